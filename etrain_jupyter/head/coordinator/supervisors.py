"""Connections to the supervisors: messages, acknowledgements and heartbeat intervals."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distributed import Scheduler

from etrain_jupyter import __version__
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_records import JobRecords
from etrain_jupyter.rules.membership.silence import BEAT_S, choose_beat_s
from etrain_jupyter.wire import codec
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.stream import MessageStream, SharedFields

logger = logging.getLogger("etrain.coordinator")

ACKNOWLEDGED_PER_S = 250.0
"""Maximum average number of acknowledgements per second. With up to 62 workers, all of them are
sent in each tick."""


class Acknowledgements:
    """Track which reports of each supervisor have been handled, and which may be acknowledged.

    Once a report's events are in its job's log, its number is recorded, so that the next scheduler
    does not handle the report again; only then is it acknowledged. See ``worker.outbox`` for a
    timeline.

    Args:
        records: Stores the sequence numbers for the next scheduler.
    """

    def __init__(self, records: JobRecords) -> None:
        self._records = records
        # Keyed by worker: the number of the newest handled report; the jobs whose logs still lack
        # events from the worker's reports, because disk writes fail; and the number to acknowledge
        # next.
        self._taken: dict[str, int] = {}
        self._blocked_by: dict[str, list[HostedJob]] = {}
        self._due: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to acknowledge, now or later."""
        return not self._due and not self._blocked_by

    def is_new(self, worker: str, number: int) -> bool:
        """Return True if a report has not been handled yet; otherwise acknowledge it again."""
        # A repeated report was resent over a new connection, perhaps to a new scheduler:
        #
        #     its events are in the logs    acknowledge again; the first message may be lost
        #     a log is behind (blocked)     no reply now: ``collect`` acknowledges it later
        heard = self._records.heard(worker)
        if number > max(heard, self._taken.get(worker, 0)):
            return True
        if worker not in self._blocked_by:
            self._due[worker] = heard
        return False

    def take(self, worker: str, number: int, jobs: Iterable[HostedJob]) -> None:
        """Note that a report with events for these jobs was handled."""
        self._taken[worker] = number
        # Acknowledgements are cumulative. While one report is blocked, the worker's later reports
        # are blocked as well, even if they are about a job whose log is up to date.
        behind = [job for job in jobs if job.job_log.is_behind]
        if behind or worker in self._blocked_by:
            known = self._blocked_by.setdefault(worker, [])
            known += [job for job in behind if job not in known]
        else:
            self._note(worker)

    def forget(self, worker: str) -> None:
        """Forget a supervisor that will not reconnect."""
        for known in (self._taken, self._blocked_by, self._due):
            known.pop(worker, None)
        self._records.forget_worker(worker)

    def collect(self) -> dict[str, int]:
        """Return, for each worker, the number of the last report that its supervisor may drop."""
        for worker, jobs in list(self._blocked_by.items()):
            if not any(job.job_log.is_behind for job in jobs):
                del self._blocked_by[worker]
                self._note(worker)
        due, self._due = self._due, {}
        return due

    def _note(self, worker: str) -> None:
        # Until the report is acknowledged, the supervisor resends it to each new scheduler, which
        # must recognize it as handled.
        number = self._taken[worker]
        self._records.note_received(worker, number)
        self._due[worker] = number


class Supervisors:
    """The supervisors of the workers of one cluster.

    Args:
        roster: The workers that have sent a hello.
        acknowledgements: Reports that have been handled.
        warn: Shows a warning to the users of all jobs.
    """

    def __init__(
        self,
        roster: WorkerRoster,
        acknowledgements: Acknowledgements,
        warn: Callable[[str], None],
    ) -> None:
        self._roster = roster
        self._acknowledgements = acknowledgements
        self._warn = warn
        self._streams: dict[str, MessageStream] = {}  # by address
        self._refused: set[str] = set()  # addresses of supervisors with another wire version
        self._acknowledged_at = -math.inf
        self._beat_s = BEAT_S  # their heartbeat interval

    def attach(self, scheduler: Scheduler) -> None:
        """Use the connections of this scheduler."""
        self._scheduler = scheduler

    # --- messages from supervisors ---

    def decode(self, message: Any, address: str) -> m.FromSupervisor | m.AnyReport | None:
        """Return a message; None if its sender has another wire version.

        Raises:
            MalformedMessageError: If it is a supervisor's own message, and cannot be decoded.
        """
        try:
            return m.FROM_SUPERVISOR.decode(message)
        except codec.WireVersionError as exc:
            self._refuse(address, exc)
            return None
        except codec.MalformedMessageError as exc:
            return self._end_sender(message, address, exc)

    def _refuse(self, address: str, exc: codec.WireVersionError) -> None:
        """Ignore a supervisor with another wire version, and log that once."""
        # Its hello is refused, so it never enters the roster. It may resend its messages.
        if address in self._refused:
            return
        self._refused.add(address)
        state = self._scheduler.workers.get(address)
        name = str(state.name) if state is not None else address
        text = (
            f"worker {name} cannot train: {exc} (etrain-jupyter {__version__}). Training continues "
            f"on the other workers. Install etrain-jupyter {__version__} there and restart that "
            "worker"
        )
        logger.error("%s", text)
        self._warn(text)

    def _end_sender(
        self, message: Any, address: str, exc: codec.MalformedMessageError
    ) -> m.TrainerExited:
        """Kill the trainer that sent a malformed report; return a trainer exit instead of it."""
        # Supervisors forward reports undecoded. Treat the exit as reported now. Otherwise, the
        # coordinator would handle the trainer's next reports without the malformed one.
        #
        #     trainer       StepsTrained of 7 (malformed)   of 8                killed
        #     coordinator     handles TrainerExited           drops it: not a member
        if not isinstance(message, dict) or not message.get("number"):
            raise exc  # the supervisor's own message
        why = f"its message cannot be decoded: {type(exc).__name__}: {exc}"
        sender = {name: message.get(name) for name in ("trainer", "number")}
        exited: m.TrainerExited = codec.decode_fields(m.TrainerExited, {**sender, "cause": why})
        logger.error("worker %s, trainer %s: %s", address, exited.trainer, why)
        self._send(address, m.TerminateTrainer(trainer=exited.trainer, why=why))
        return exited

    def greet(self, hello: m.SupervisorHello, address: str, now: float) -> WorkerFacts | None:
        """Add the worker of a hello to the roster; return None if this incarnation is fenced."""
        facts = WorkerFacts(
            name=str(self._scheduler.workers[address].name),
            address=address,
            device=hello.device,
            pid=hello.pid,
            incarnation=hello.incarnation,
            fingerprint=hello.fingerprint,
        )
        if not self._roster.greet(facts, now):
            return None
        if self._beat_s != BEAT_S:
            self._send(address, m.SetHeartbeatInterval(interval_s=self._beat_s))
        return facts

    def remove(self, address: str) -> WorkerFacts | None:
        """Forget a supervisor whose connection is closed; return its worker unless evicted."""
        self._refused.discard(address)
        self._streams.pop(address, None)
        facts = self._roster.remove(address)
        if facts is not None:
            self._acknowledgements.forget(facts.name)
        return facts

    # --- messages to supervisors ---

    def acknowledge(self, now: float) -> None:
        """Send each supervisor the number of the last report that it may drop."""
        # Each rank sends several reports when a generation changes. In a large cluster, one message
        # acknowledges them all.
        if 0.0 <= now - self._acknowledged_at < len(self._roster) / ACKNOWLEDGED_PER_S:
            return
        self._acknowledged_at = now
        for worker, number in self._acknowledgements.collect().items():
            self.send_to(worker, m.AcknowledgeReports(number=number))

    def pace_heartbeats(self) -> None:
        """Lengthen the heartbeat interval as the number of workers grows."""
        num, limit_s = len(self._roster), self._roster.silence_s
        beat_s = choose_beat_s(num, current_s=self._beat_s, limit_s=limit_s)
        if beat_s != self._beat_s:
            self._beat_s = beat_s
            self.send_to_each(m.SetHeartbeatInterval(interval_s=beat_s))

    def reset(self, address: str) -> None:
        """Send a reset to an evicted supervisor, which ignores repeated resets."""
        incarnation = self._roster.evicted_incarnation(address)
        if incarnation is not None:
            self._send(address, m.ResetSupervisor(incarnation=incarnation))

    def send_to(self, worker: str, message: m.ToSupervisor | m.ToTrainer) -> None:
        """Send a message to a worker's supervisor; drop it if the worker is gone."""
        facts = self._roster.get(worker)
        if facts is not None:
            self._send(facts.address, message)

    def send_to_each(self, message: m.ToSupervisor) -> None:
        """Send a message to all supervisors."""
        for facts in self._roster:
            self._send(facts.address, message)

    def send_all(
        self, message: m.ToTrainer, recipients: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> None:
        """Send a message to several workers, each with its own values of some fields."""
        differing = {name for _, own in recipients for name in own}
        encoded = codec.encode(message).items()
        shared = SharedFields({name: value for name, value in encoded if name not in differing})
        for worker, own in recipients:
            facts = self._roster.get(worker)
            stream = self._stream_to(facts.address) if facts is not None else None
            if stream is not None:
                stream.send_shared(shared, own)

    def _send(self, address: str, message: m.ToSupervisor | m.ToTrainer) -> None:
        stream = self._stream_to(address)
        if stream is not None:
            stream.send(codec.encode(message))

    def _stream_to(self, address: str) -> MessageStream | None:
        batched = self._scheduler.stream_comms.get(address)
        if batched is None:
            return None
        stream = self._streams.get(address)
        if stream is None or stream.batched is not batched:
            stream = self._streams[address] = MessageStream(batched, "etrain_message")
        return stream
