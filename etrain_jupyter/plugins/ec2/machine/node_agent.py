"""The agent of a node: runs the workers of one EC2 machine.

It starts the workers once it has read the cluster's files. It turns the machine off when they have
exited, when the lease of the cluster's head is lost, when the machine's lifetime is over, or when
anything in the agent fails. No computation runs in the agent's process.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from etrain_jupyter.plugins.ec2.machine.base_agent import (
    BOOT_S,
    POLL_S,
    MachineAgent,
    arm_timer,
    logger,
)
from etrain_jupyter.plugins.ec2.machine.children import prepare_folder, slots_of_machine
from etrain_jupyter.plugins.ec2.machine.imds import NoticeWatch
from etrain_jupyter.plugins.ec2.machine.lease import LEASE, LeaseWatch
from etrain_jupyter.plugins.ec2.machine.node_worker import SCHEDULER_FILE, SERVING_FILE, TLS
from etrain_jupyter.plugins.ec2.node_config import worker_names
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.processes import MARKER
from etrain_jupyter.process.tls import write_certificates
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE as OWNERS
from etrain_jupyter.worker.preemption_watch import Notice

WORKER = "etrain_jupyter.plugins.ec2.machine.node_worker"
TLS_FILES = ("ca.pem", "worker.pem", "worker.key")

FIRST_HOUR_S = 3600.0
"""A spot machine that EC2 reclaims in its first hour is free; one that turns itself off is not."""
RECLAIM_MARGIN_S = 60.0
"""Time to wait after a notice's deadline for EC2 to reclaim the machine, in seconds."""
MAX_NOTICE_S = 300.0


class NodeAgent(MachineAgent):
    """Runs the workers of a node."""

    def __init__(self, url: str, folder: Path, *, keys: str, owner: str = "") -> None:
        super().__init__(url, folder, keys=keys, owner=owner)
        self._notices: NoticeWatch
        self._scheduler: dict[str, Any] = {}
        self._is_ready = False
        self._is_drain_requested = False

    # --- start ---

    def _start(self) -> None:
        poll_s = self._config.imds_poll_s
        self._notices = NoticeWatch(self._imds, self._on_notice, poll_s=poll_s)
        self._watches.append(self._notices)
        self._notices.start()
        # Watch for notices from here on: EC2 may reclaim a machine that is still booting.
        prepare_folder(self._folder)
        keys = self._wait_for(
            "the certificates",
            lambda: {name: self._read(f"{self._keys}/{name}").decode() for name in TLS_FILES},
        )
        write_certificates(self._folder / TLS, keys)
        # Workers need the scheduler's address when they start. If there is no lease, the head is
        # already gone, and the boot timeout turns the machine off.
        self._note_scheduler(self._wait_for("the lease", self._read_lease))
        self._lease = LeaseWatch(
            self._bucket,
            ttl_s=self._config.lease_ttl_s,
            check_s=self._config.lease_check_s,
            on_change=self._note_scheduler,
            on_lost=lambda why: self._inbox.put(("lost", why)),
        )
        self._watches.append(self._lease)
        self._lease.start()
        self._start_workers()

    def _read_lease(self) -> dict[str, Any]:
        lease = self._read_json(LEASE)
        return {key: lease[key] for key in ("scheduler", "num_lives")}

    def _note_scheduler(self, scheduler: dict[str, Any]) -> None:
        # Called on the main thread before the watch starts, and on the watch's thread afterwards.
        if scheduler == self._scheduler:
            return
        self._scheduler = scheduler
        logger.info(
            "the scheduler is at %s (incarnation %s)",
            scheduler["scheduler"],
            scheduler["num_lives"],
        )
        write_private(self._folder / SCHEDULER_FILE, json.dumps(scheduler))

    def _start_workers(self) -> None:
        config, me = self._config, self._identity
        # The head derives the same names from EC2's description of the type. If the driver reports
        # a different number of GPUs, the missing workers never connect, but one connected worker is
        # enough for the node to count as ready.
        slots = slots_of_machine(config.workers_per_node)
        for name, slot in zip(worker_names(me.instance_id, len(slots)), slots, strict=True):
            options = {
                "name": name,
                "device": slot.device,
                "supervisor": config.supervisor,
                "host": me.private_ip,
                # The lease limits how long the head may be away, and the agent enforces this limit.
                "away-s": str(2 * config.lease_ttl_s + BOOT_S),
            }
            arguments = [arg for key, value in options.items() for arg in (f"--{key}", value)]
            environment = {
                "AWS_DEFAULT_REGION": me.region,
                # The user's variables may override the region above, but not the variables below,
                # which identify the cluster.
                **config.role_env,
                OWNERS: self._bucket_owners(),
                MARKER: config.cluster_id,
                "ETRAIN_NOTICES": "imds",
                "ETRAIN_NOTICE_POLL_S": str(config.imds_poll_s),
                "ETRAIN_NOTICE_S": str(config.drain_s),
                **slot.environment,
            }
            self._children.start(name, WORKER, [str(self._folder), *arguments], environment)

    # --- service ---

    def _on_notice(self, notice: Notice) -> None:
        self._inbox.put(("notice", notice))

    def _poll(self) -> str:
        self._drain_if_due()
        # A worker touches this file each time it connects to a scheduler. One such file is enough:
        # the machine is in use. From now on, the lifetime applies instead of the boot timeout.
        if not self._is_ready and any(self._folder.glob(f"{SERVING_FILE}-*")):
            self._is_ready = True
            arm_timer(self._ends_at - time.monotonic())
            assert self._reports is not None
            self._reports.report("ready")
        return self._after_workers() if self._children.have_ended else ""

    def _drain_if_due(self) -> None:
        left_s = self._ends_at - time.monotonic()
        if self._is_ready and not self._is_drain_requested and left_s <= self._config.drain_s:
            # Send SIGUSR1 only once, because a supervisor treats it as an interruption notice of
            # ETRAIN_NOTICE_S seconds.
            self._is_drain_requested = True
            logger.warning("the lifetime is over in %.0f s: notifying the workers", left_s)
            self._children.signal(signal.SIGUSR1)

    def _after_workers(self) -> str:
        """Return why the machine must be turned off.

        First wait for EC2 if it will reclaim the machine for free::

            notice         workers drain, exit    deadline     + RECLAIM_MARGIN_S
              |--------------------|-----------------|---------------|
                                   | wait: EC2 reclaims it,          | power off,
                                   | free of charge                  | charged as usual
        """
        codes = self._children.codes()
        exits = ", ".join(f"{name}: exit code {code}" for name, code in codes.items())
        why = f"all workers have ended ({exits})"
        if self._notice is None:
            # The workers poll for notices, too, and may have exited before our watch has seen the
            # notice. Put it into the mailbox now, and process the messages next.
            self._notices.poll_now()
        self._take_messages(0.0)
        if self._notice is None or not self._is_free(self._notice):
            return why
        # EC2 gives two minutes' notice. A deadline far in the future is an error in the service or
        # the clock.
        left_s = min(self._notice.left_s(), MAX_NOTICE_S)
        logger.warning("%s; EC2 reclaims this machine in %.0f s, at no charge", why, left_s)
        until = time.monotonic() + left_s + RECLAIM_MARGIN_S
        while time.monotonic() < until and not self._is_stop_requested:
            self._take_messages(POLL_S)
        return f"{why}, and EC2 has not reclaimed this machine as announced"

    def _is_free(self, notice: Notice) -> bool:
        """Return whether EC2 charges nothing if it reclaims the machine at the deadline."""
        # Age of the machine at the deadline, from AWS's clock at boot and the monotonic clock since
        # then.
        age_s = self._identity.age_s + time.monotonic() - self._known_at + notice.left_s()
        is_spot = self._identity.lifecycle == "spot"
        return is_spot and self._config.first_hour == "wait-for-ec2" and age_s < FIRST_HOUR_S
