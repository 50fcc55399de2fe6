"""The agent of an EC2 node: ``python -m etrain_jupyter.pools.ec2.machine.agent s3://bucket/.../ID``.

The last line of the machine's user-data. It learns who the machine is, fetches what the cluster has
put into S3 for its nodes, starts the workers, and turns the machine off: when they have ended, when
the lease of the cluster's head is lost, when its time is over, or when anything here goes wrong. It
shares its process with nothing that computes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etrain_jupyter.config.store_url import S3
from etrain_jupyter.pools.ec2.machine.children import (
    Children,
    names_of,
    prepare_folder,
    slots_of_machine,
)
from etrain_jupyter.pools.ec2.machine.lease import LEASE, LeaseWatch
from etrain_jupyter.pools.ec2.machine.node_reports import NodeReports
from etrain_jupyter.pools.ec2.machine.node_store import NodeStore, StoreError
from etrain_jupyter.pools.ec2.machine.node_worker import SCHEDULER_FILE, SERVING_FILE, TLS
from etrain_jupyter.pools.ec2.machine.power import arm_timer, power_off
from etrain_jupyter.pools.ec2.machine.redaction import redact_logs
from etrain_jupyter.pools.ec2.node_config import NodeConfig
from etrain_jupyter.process.entry import log_to_stderr
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.processes import MARKER
from etrain_jupyter.process.tls import write_certificates
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE as OWNERS
from etrain_jupyter.storage.objects.bucket_owners import with_owner
from etrain_jupyter.wire.notices import INTERRUPTION
from etrain_jupyter.wire.versions import compare, read_fingerprint
from etrain_jupyter.worker.imds import Identity, Imds
from etrain_jupyter.worker.notices import Notice, NoticeWatch

logger = logging.getLogger("etrain.agent")

WORKER = "etrain_jupyter.pools.ec2.machine.node_worker"
TLS_FILES = ("ca.pem", "worker.pem", "worker.key")

BOOT_S = 600.0
"""How long to try to reach the metadata service and S3 when the machine starts: a role that was
made a moment ago is not known everywhere."""
BOOT_RETRY_S = 2.0
LOOK_S = 0.25
FIRST_HOUR_S = 3600.0
"""A spot machine that EC2 takes in its first hour is not charged; one that ends itself is."""
TAKEN_S = 60.0
"""How long to wait beyond the deadline of a notice for EC2 to take the machine."""
LONGEST_NOTICE_S = 300.0
END_S = 10.0
"""How long workers may take to end when somebody ends the agent."""


class AgentError(Exception):
    """Why this machine is of no use."""


class AskedToEndError(AgentError):
    """Somebody sent SIGTERM."""


class Agent:
    """One machine, from the start of its user-data to its end.

    Args:
        url: Where the cluster's objects are.
        folder: For certificates and Dask; removed at the end.
        keys: Folder of the certificates, below ``url``.
        owner: Account that the bucket must belong to; empty for any.
    """

    def __init__(self, url: str, folder: Path, *, keys: str, owner: str = "") -> None:
        self._url = url
        self._keys, self._owner = keys, owner
        self._folder = folder
        self._imds = Imds()
        self._children = Children()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._watches: list[NoticeWatch | LeaseWatch] = []
        self._notices: NoticeWatch
        self._lease: LeaseWatch | None = None
        self._reports: NodeReports | None = None
        self._is_asked_to_end = False
        self._lost = ""
        self._notice: Notice | None = None
        self._scheduler: dict[str, Any] = {}
        self._is_ready = False
        self._is_drain_told = False

    def ask_to_end(self, *_: object) -> None:
        """End the workers gently, then the machine; may be called by a signal handler."""
        self._inbox.put(("end", None))

    def run(self) -> str:
        """Serve; return why the machine shall be turned off."""
        try:
            self._boot()
            return self._serve()
        except AskedToEndError as exc:
            self._children.end(END_S)
            return str(exc)
        except AgentError as exc:
            return str(exc)
        except BaseException as exc:
            logger.exception("the agent failed")
            return f"the agent failed: {type(exc).__name__}: {exc}"

    def turn_off(self, why: str) -> bool:
        """Turn the machine off, then clean up; nothing may hold the first of these up."""
        logger.error("turning off: %s", why)
        if self._reports is not None:
            self._reports.end(why)
        is_off = power_off()
        for watch in self._watches:
            watch.stop()
        self._children.end(0.0)
        if self._reports is not None:
            self._reports.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return is_off

    # --- start ---

    def _boot(self) -> None:
        self._identity: Identity = self._insist("the metadata service", self._imds.identity)
        self._known_at = time.monotonic()
        me = self._identity
        facts = (me.instance_id, me.type, me.zone, me.lifecycle)
        logger.info("this is %s, %s in %s, %s", *facts)
        self._store = NodeStore(self._url, region=me.region, owner=self._owner)
        self._config = self._insist("config.json", self._read_config)
        self._ends_at = self._known_at + self._config.lifetime_s - max(0.0, me.age_s)
        fingerprint = read_fingerprint()
        self._reports = NodeReports(self._store, me, fingerprint)
        self._reports.say("booting")
        self._check(fingerprint)
        poll_s = self._config.imds_poll_s
        self._notices = NoticeWatch(self._imds, self._on_notice, poll_s=poll_s)
        self._watches.append(self._notices)
        self._notices.start()
        prepare_folder(self._folder)
        write_certificates(self._folder / TLS, self._insist("the certificates", self._read_tls))
        self._insist("the lease", self._read_lease)
        self._watch_lease()
        self._start_workers()

    def _insist(self, what: str, read: Callable[[], Any]) -> Any:
        """Return what can be read now or soon.

        Raises:
            AgentError: If it cannot be for too long.
        """
        deadline = time.monotonic() + BOOT_S
        told = ""
        while True:
            try:
                return read()
            except (OSError, ValueError, KeyError) as exc:
                words = f"{type(exc).__name__}: {exc}"
            if words != told:
                logger.warning("%s cannot be read yet: %s", what, words)
                told = words
            if time.monotonic() >= deadline:
                raise AgentError(f"{what} could not be read for {BOOT_S:.0f} s: {words}")
            self._take_messages(BOOT_RETRY_S)
            if self._is_asked_to_end:
                raise AskedToEndError("the agent was asked to end")

    def _read_config(self) -> NodeConfig:
        return NodeConfig.from_json(self._read("config.json"))

    def _read_tls(self) -> dict[str, str]:
        return {name: self._read(f"{self._keys}/{name}").decode() for name in TLS_FILES}

    def _read_lease(self) -> None:
        lease = json.loads(self._read(LEASE))
        self._note_scheduler({key: lease[key] for key in ("scheduler", "num_lives")})

    def _read(self, name: str) -> bytes:
        found = self._store.read(name)
        if found is None:
            raise StoreError(f"{name}: there is none")
        return found.data

    def _check(self, fingerprint: dict[str, str]) -> None:
        """Refuse to work where the notebook's objects could not be read."""
        name = self._identity.instance_id
        found = compare(fingerprint, self._config.fingerprint, at=name, here="the notebook")
        for note in found.notes:
            logger.warning("%s: it works all the same", note)
        if found.fits or self._reports is None:
            return
        error = (
            f"{'; '.join(found.wrong)}. No worker was started there. Install "
            f"{' and '.join(found.remedies)} in the image (image.ami, image.archive or image.setup "
            "of the pool), or start the notebook with the versions of the image."
        )
        self._reports.refuse(error)
        raise AgentError(error)

    def _watch_lease(self) -> None:
        self._lease = LeaseWatch(
            self._store,
            ttl_s=self._config.lease_ttl_s,
            check_s=self._config.lease_check_s,
            on_news=self._note_scheduler,
            on_lost=lambda why: self._inbox.put(("lost", why)),
        )
        self._watches.append(self._lease)
        self._lease.start()

    def _note_scheduler(self, news: dict[str, Any]) -> None:
        """Let the workers know where the scheduler is."""
        if news == self._scheduler:
            return
        self._scheduler = news
        logger.info("the scheduler is at %s (number %s)", news["scheduler"], news["num_lives"])
        write_private(self._folder / SCHEDULER_FILE, json.dumps(news))

    def _owners(self) -> str:
        """Return who must own which bucket: ours, and what the pool's ``environment`` says."""
        bucket = self._url.removeprefix(S3).partition("/")[0]
        return with_owner(self._config.role_env.get(OWNERS, ""), bucket, self._owner)

    def _start_workers(self) -> None:
        config, me = self._config, self._identity
        slots = slots_of_machine(config.workers_per_node)
        for name, slot in zip(names_of(me.instance_id, len(slots)), slots, strict=True):
            words = {
                "name": name,
                "device": slot.device,
                "supervisor": config.supervisor,
                "host": me.private_ip,
                # The lease decides how long the head may be away, and we see to that.
                "away-s": str(2 * config.lease_ttl_s + BOOT_S),
            }
            options = [word for key, value in words.items() for word in (f"--{key}", value)]
            environment = {
                "AWS_DEFAULT_REGION": me.region,
                **config.role_env,
                OWNERS: self._owners(),
                MARKER: config.cluster_id,
                "ETRAIN_NOTICES": "imds",
                "ETRAIN_NOTICE_POLL_S": str(config.imds_poll_s),
                "ETRAIN_NOTICE_S": str(config.drain_s),
                **slot.environment,
            }
            self._children.start(name, WORKER, [str(self._folder), *options], environment)

    # --- service ---

    def _on_notice(self, notice: Notice) -> None:
        self._inbox.put(("notice", notice))

    def _take_messages(self, timeout_s: float) -> None:
        """Take what threads and signals have said, waiting for the first of it."""
        with contextlib.suppress(queue.Empty):
            while True:
                kind, value = self._inbox.get(timeout=timeout_s)
                timeout_s = 0.0
                if kind == "end":
                    self._is_asked_to_end = True
                elif kind == "lost":
                    self._lost = value
                elif value.kind == INTERRUPTION:
                    self._notice = value

    def _serve(self) -> str:
        while True:
            self._take_messages(LOOK_S)
            if why := self._is_over():
                return why
            if self._is_asked_to_end:
                raise AskedToEndError("the agent was asked to end")
            self._drain_if_due()
            if not self._is_ready and any(self._folder.glob(f"{SERVING_FILE}-*")):
                self._is_ready = True
                arm_timer(self._ends_at - time.monotonic())
                assert self._reports is not None
                self._reports.say("ready")
            if self._children.have_ended:
                return self._after_workers()

    def _is_over(self) -> str:
        """Return why the machine must not go on, an empty string if it may."""
        if self._lost:
            return self._lost
        if self._lease is not None and self._lease.stuck_s():
            return "the watch of the lease is stuck"
        if time.monotonic() >= self._ends_at:
            return f"its lifetime of {self._config.lifetime_s:g} s is over"
        return ""

    def _drain_if_due(self) -> None:
        """Give the workers notice before the lifetime is over."""
        left_s = self._ends_at - time.monotonic()
        if self._is_ready and not self._is_drain_told and left_s <= self._config.drain_s:
            self._is_drain_told = True
            logger.warning("the lifetime is over in %.0f s: the workers are given notice", left_s)
            self._children.signal(signal.SIGUSR1)

    def _after_workers(self) -> str:
        codes = self._children.codes()
        told = ", ".join(f"{name}: exit code {code}" for name, code in codes.items())
        why = f"all workers have ended ({told})"
        if self._notice is None:
            # The workers look for themselves, and may have gone before our watch has seen why.
            self._notices.look_now()
        self._take_messages(0.0)
        if self._notice is None or not self._is_free(self._notice):
            return why
        left_s = min(self._notice.left_s(), LONGEST_NOTICE_S)
        logger.warning("%s; EC2 takes this machine in %.0f s, at no charge", why, left_s)
        until = time.monotonic() + left_s + TAKEN_S
        while time.monotonic() < until and not self._is_asked_to_end:
            self._take_messages(LOOK_S)
        return f"{why}, and EC2 has not taken this machine as it said"

    def _is_free(self, notice: Notice) -> bool:
        """Whether the machine costs nothing if EC2 takes it."""
        age_s = self._identity.age_s + time.monotonic() - self._known_at + notice.left_s()
        is_spot = self._identity.lifecycle == "spot"
        return is_spot and self._config.first_hour == "wait-for-ec2" and age_s < FIRST_HOUR_S


def make_head(url: str, folder: Path, *, keys: str, owner: str = "") -> Agent:
    """Return the agent of a head; a node need not load what that has."""
    from etrain_jupyter.pools.ec2.machine.head_agent import HeadAgent

    return HeadAgent(url, folder, keys=keys, owner=owner)


AGENTS: dict[str, Callable[..., Agent]] = {"node": Agent, "head": make_head}
"""What a machine may be, by ``ETRAIN_ROLE``."""


def main(words: Sequence[str] | None = None) -> None:
    """Run until the machine is off."""
    parser = argparse.ArgumentParser(prog="etrain-agent")
    parser.add_argument("url", help="where the cluster's objects are: s3://bucket/prefix")
    parser.add_argument("--keys", required=True, help="folder of the certificates, below the url")
    parser.add_argument("--owner", default="", help="account that the bucket must belong to")
    told = parser.parse_args(words)
    log_to_stderr()
    redact_logs()
    # boto3 would ask for the role's credentials through a proxy.
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    os.environ["NO_PROXY"] = ",".join(filter(None, (known, "169.254.169.254")))
    folder = os.environ.get("ETRAIN_NODE_DIR") or tempfile.mkdtemp(prefix="etrain-node-")
    role = os.environ.get("ETRAIN_ROLE", "node")
    agent = AGENTS.get(role, Agent)(told.url, Path(folder), keys=told.keys, owner=told.owner)
    signal.signal(signal.SIGTERM, agent.ask_to_end)
    why = f"ETRAIN_ROLE={role} is unknown to this version" if role not in AGENTS else agent.run()
    is_off = agent.turn_off(why)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0 if is_off else 1)


if __name__ == "__main__":
    main()
