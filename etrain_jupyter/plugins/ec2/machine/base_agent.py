"""Base of the agents: boot, mailbox, end of the lifetime, and turning the machine off.

A machine must never stay on by mistake, so three time limits turn it off, and so does any exception
in the agent::

    launch          lifetime.boot            lease_ttl               lifetime.max
      |--------------------|-------- ... --------|-------- ... -----------|
    user-data arms    nothing serves here   the head has not       the agent ends it;
    `shutdown -h +N`  yet: the system's     renewed its lease:     the system's timer does
                      timer ends it         nodes end themselves   if the agent hangs
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from etrain_jupyter.config.store_url import S3, split_s3_url
from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.machine.children import Children
from etrain_jupyter.plugins.ec2.machine.imds import Identity, Imds, NoticeWatch, is_made_by_ec2
from etrain_jupyter.plugins.ec2.machine.lease import LeaseWatch
from etrain_jupyter.plugins.ec2.machine.node_reports import NodeReports
from etrain_jupyter.plugins.ec2.node_config import NodeConfig
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE as OWNERS
from etrain_jupyter.storage.objects.bucket_owners import with_owner
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.storage.objects.s3_requests import S3Limits, client_of_environment
from etrain_jupyter.wire.messages import INTERRUPTION
from etrain_jupyter.wire.versions import compare, read_fingerprint
from etrain_jupyter.worker.preemption_watch import Notice

logger = logging.getLogger("etrain.agent")
T = TypeVar("T")

BOOT_S = 600.0
"""Timeout for the metadata service and S3 at boot, in seconds: a new role takes minutes to
propagate through AWS."""
BOOT_RETRY_S = 2.0
POLL_S = 0.25
STOP_S = 10.0
"""Time for the workers to exit after SIGTERM, in seconds."""
LIMITS = S3Limits(
    connect_timeout_s=3.0,
    read_timeout_s=5.0,
    num_requests=3,
    num_attempts=2,
    patience_s=5.0,
    deadline_s=20.0,
)
"""Every call returns within half a minute, regardless of the network, because a machine that cannot
reach S3 must be able to turn itself off."""
logger = logging.getLogger("etrain.agent")
COMMAND_S = 10.0
"""Timeout of a command that turns the machine off, in seconds."""
RETRY_S = 5.0
LAST_RESORTS = (["systemctl", "poweroff", "--force"], ["poweroff", "-f"])
"""Commands to try on an EC2 machine if ``shutdown`` fails."""


class AgentError(Exception):
    """The reason why this machine cannot be used."""


class StopRequestedError(AgentError):
    """The agent received SIGTERM."""


class MachineAgent:
    """Runs one machine from the end of its user-data to power-off.

    Subclasses start the machine's processes in ``_start`` and check on them in ``_poll``. Other
    threads and signal handlers only put messages into ``_inbox``: the main thread owns the state.
    """

    _identity: Identity
    _known_at: float
    """When the identity was read, by ``time.monotonic``."""
    _bucket: Bucket
    _config: NodeConfig
    _ends_at: float
    """End of the lifetime, by ``time.monotonic``."""

    def __init__(self, url: str, folder: Path, *, keys: str, owner: str = "") -> None:
        self._url = url
        self._keys, self._owner = keys, owner
        self._folder = folder
        self._imds = Imds()
        self._children = Children()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._watches: list[NoticeWatch | LeaseWatch] = []
        self._lease: LeaseWatch | None = None
        self._reports: NodeReports | None = None
        self._is_stop_requested = False
        self._lost = ""
        self._notice: Notice | None = None

    def request_stop(self, *_: object) -> None:
        """Stop the workers gracefully, then the machine; may be called by a signal handler."""
        # SimpleQueue.put is reentrant, so a signal handler may interrupt another put in this
        # thread.
        self._inbox.put(("stop", None))

    def run(self) -> str:
        """Boot and serve; return why the machine must be turned off."""
        try:
            self._boot()
            self._start()
            return self._serve()
        except StopRequestedError as exc:
            # Only an orderly stop gives the workers time to exit. In all other cases, `turn_off`
            # kills them, at the latest when the system goes down.
            self._children.end(STOP_S)
            return str(exc)
        except AgentError as exc:
            return str(exc)
        except BaseException as exc:  # catch everything: the machine must not stay on
            logger.exception("the agent failed")
            return f"the agent failed: {type(exc).__name__}: {exc}"

    def turn_off(self, why: str) -> bool:
        """Turn the machine off, then clean up, because nothing may delay the power-off."""
        logger.error("turning off: %s", why)
        if self._reports is not None:
            self._reports.end(why)
        # The report above is only queued. Everything that can block (S3, joins, killed processes in
        # uninterruptible sleep) comes after the power-off, because each extra second is charged.
        is_off = power_off()
        for watch in self._watches:
            watch.stop()
        self._children.end(0.0)
        if self._reports is not None:
            self._reports.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return is_off

    def _start(self) -> None:
        raise NotImplementedError

    def _poll(self) -> str:
        """Return why the machine must be turned off, or an empty string."""
        raise NotImplementedError

    # --- boot ---

    def _boot(self) -> None:
        self._identity = self._wait_for("the metadata service", self._imds.identity)
        self._known_at = time.monotonic()
        me = self._identity
        facts = (me.instance_id, me.type, me.zone, me.lifecycle)
        logger.info("this is %s, %s in %s, %s", *facts)
        self._bucket = open_node_bucket(self._url, region=me.region, owner=self._owner)
        self._config = self._wait_for(
            "config.json", lambda: NodeConfig.from_json(self._read("config.json"))
        )
        # The lifetime starts at the launch, not at this boot. The age at boot comes from AWS's
        # clock, and the time since then from the monotonic clock, so a wrong system clock does not
        # change the lifetime.
        self._ends_at = self._known_at + self._config.lifetime_s - max(0.0, me.age_s)
        fingerprint = read_fingerprint()
        self._reports = NodeReports(self._bucket, me, fingerprint)
        self._reports.report("booting")
        self._check_versions(fingerprint)

    def _wait_for(self, what: str, read: Callable[[], T]) -> T:
        """Retry ``read``; raise ``AgentError`` if it still fails after ``BOOT_S``."""
        deadline = time.monotonic() + BOOT_S
        logged = ""
        while True:
            try:
                return read()
            # These errors are normal at boot: the network comes up late, a new role has not
            # propagated yet, and the head may still be writing the objects. ValueError and KeyError
            # come from truncated or outdated objects.
            except (OSError, ValueError, KeyError, StoreError) as exc:
                error = f"{type(exc).__name__}: {exc}"
            # Log only changes: the log is the machine's console, and EC2 limits it to 64 KiB.
            if error != logged:
                logger.warning("%s cannot be read yet: %s", what, error)
                logged = error
            if time.monotonic() >= deadline:
                raise AgentError(f"{what} could not be read for {BOOT_S:.0f} s: {error}")
            # Sleep on the mailbox, so that SIGTERM ends the wait.
            self._take_messages(BOOT_RETRY_S)
            if self._is_stop_requested:
                raise StopRequestedError("the agent received a request to stop")

    def _read_json(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._read(name))
        return value

    def _read(self, name: str) -> bytes:
        data = self._bucket.get(name, f"{name} cannot be read")
        if data is None:
            raise StoreError(f"{name} does not exist in {self._bucket}")
        return data

    def _check_versions(self, fingerprint: dict[str, str]) -> None:
        """Refuse to serve if objects pickled by the notebook could not be unpickled here."""
        name = self._identity.instance_id
        found = compare(fingerprint, self._config.fingerprint, at=name, here="the notebook")
        for note in found.notes:
            logger.warning("%s: compatible, continuing", note)
        if found.fits or self._reports is None:
            return
        error = (
            f"{'; '.join(found.wrong)}. No worker was started there. Install "
            f"{' and '.join(found.remedies)} in the image (image.ami, image.archive or image.setup "
            "of the pool), or start the notebook with the versions of the image."
        )
        # Wait until the refusal is in S3: the head shows it to the user, and counts a boot failure
        # at once instead of after the boot timeout.
        self._reports.refuse(error)
        raise AgentError(error)

    def _bucket_owners(self) -> str:
        # Workers get this as ETRAIN_BUCKET_OWNERS, for checkpoints in the cluster's bucket or in
        # others.
        bucket = self._url.removeprefix(S3).partition("/")[0]
        return with_owner(self._config.role_env.get(OWNERS, ""), bucket, self._owner)

    # --- service ---

    def _serve(self) -> str:
        while True:
            self._take_messages(POLL_S)
            # Check for a lost lease and the end of the lifetime before a stop request and `_poll`:
            # these two must turn the machine off, whatever the state of the workers is.
            if why := self._reason_to_end():
                return why
            if self._is_stop_requested:
                raise StopRequestedError("the agent received a request to stop")
            if why := self._poll():
                return why

    def _take_messages(self, timeout_s: float) -> None:
        """Process messages from threads and signal handlers; wait for the first one."""
        with contextlib.suppress(queue.Empty):
            while True:
                kind, value = self._inbox.get(timeout=timeout_s)
                timeout_s = 0.0
                if kind == "stop":
                    self._is_stop_requested = True
                elif kind == "lost":
                    self._lost = value
                # The agent ignores rebalance recommendations. The supervisors poll for notices
                # themselves and report them to the coordinator. The agent only needs the deadline;
                # see `_after_workers`.
                elif value.kind == INTERRUPTION:
                    self._notice = value

    def _reason_to_end(self) -> str:
        if self._lost:
            return self._lost
        # The watch runs on its own thread, and a request may block this thread despite the
        # request's timeouts. Without this check, a stuck watch would keep the machine on after its
        # head is gone.
        if self._lease is not None and self._lease.stuck_s():
            return "the watch of the lease is stuck"
        if time.monotonic() >= self._ends_at:
            return f"its lifetime of {self._config.lifetime_s:g} s is over"
        return ""


def open_node_bucket(url: str, *, region: str, owner: str = "") -> Bucket:
    """Return the objects below an ``s3://`` URL; no request is sent yet."""
    name, prefix = split_s3_url(url)
    # The credentials of the machine's role, which boto3 reads from the metadata service and renews.
    make_client = partial(client_of_environment, region=region)
    return Bucket(
        name, prefix, LIMITS, setting="bucket", make_client=make_client, owner=lambda: owner
    )


def arm_timer(left_s: float) -> None:
    """Schedule a system shutdown, replacing any previous one."""
    # `shutdown` accepts whole minutes only. Round up: the agent itself ends the lifetime to the
    # second, and this timer is for an agent that hangs.
    minutes = max(1, math.ceil(left_s / 60))
    # If none is scheduled, this at worst logs a warning.
    _run(["shutdown", "-c"])
    _run(["shutdown", "-h", f"+{minutes}"])
    logger.info("this machine turns off in %d min at the latest", minutes)


def power_off(num_tries: int = 12) -> bool:
    """Turn the machine off; return whether a command succeeded."""
    # A failure may be temporary, and a machine that stays on is charged without limit.
    for number in range(num_tries):
        if number:
            time.sleep(RETRY_S)
        # The launch template has InstanceInitiatedShutdownBehavior "terminate", so a halt from
        # inside terminates the machine, and needs neither credentials nor a network.
        # Never force a laptop off.
        commands = [["shutdown", "-h", "now"], *(LAST_RESORTS if is_made_by_ec2() else ())]
        if any(_run(command) for command in commands):
            return True
    return False


def _run(command: list[str]) -> bool:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, timeout=COMMAND_S, check=False, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        logger.error("%s: %s", " ".join(command), exc)
        return False
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()
        logger.warning("%s: exit code %d %s", " ".join(command), done.returncode, output)
    return done.returncode == 0
