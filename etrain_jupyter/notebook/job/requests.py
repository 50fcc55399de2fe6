"""Requests to a job's coordinator; each returns a message for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etrain_jupyter.errors import ConfigError, EtrainError, JobLostError, PoolError
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.job.followed_job import FollowedJob
from etrain_jupyter.notebook.job.link import NoAnswerError
from etrain_jupyter.notebook.job.resume import ResumeRequest, resume_job
from etrain_jupyter.notebook.job.waiting import ENDED
from etrain_jupyter.wire.requests import ControlJob

REQUEST_S = 30.0
"""Timeout of a request, in seconds."""

_NOTHING_TO = {
    "chaos": "no worker left to disturb",
    "fault": "no worker left to disturb",
    "kill": "no worker left to kill",
    "preempt": "no worker left to preempt",
    "checkpoint": "nothing left to save",
}


class JobRequests(FollowedJob):
    """The part of ``TrainingJob`` that sends requests to the coordinator."""

    def pause(self) -> str:
        """Pause the ranks after their next step; they keep their state."""
        return self.request("pause")

    def resume(
        self,
        *,
        pool: str | None = None,
        min: int | None = None,
        max: int | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        force: bool = False,
        trust: bool = False,
    ) -> str:
        """Resume a paused job, an ended job, or a job whose cluster has ended.

        An ended job is resumed from its newest checkpoint, and keeps its log and curve.

        Args:
            pool: New pool of its workers; by default the same pool.
            min: New minimum number of workers.
            max: New maximum number of workers.
            epochs: Number of epochs in total.
            steps: Number of steps in total, instead of epochs.
            force: Resume even if a changed setting affects the rest of the curve.
            trust: Resume even if another user submitted the job. Its code then runs under your
            account.

        Raises:
            ConfigError: If a value is invalid for the job, or no step is left to train.
            UntrustedJobError: If this machine has no proof that you submitted the job.
            EtrainError: If the job is being trained.
        """
        given = {"pool": pool, "min": min, "max": max, "epochs": epochs, "steps": steps}
        values = {key: value for key, value in given.items() if value is not None}
        self._latest()
        is_over = self.status in TERMINAL_STATUSES or self._feed.lost or self._feed.trouble
        # A paused job is resumed by a request to its coordinator, an ended one by a new submit:
        #   the coordinator responds, no changes are given  -> request
        #   changes are given                                -> submit; refused during training
        #   ended, lost, or scheduler unreachable            -> submit
        #   only its log is readable, in a folder            -> submit; needs --force
        # A job in a bucket has a heartbeat there; without one, the job counts as lost.
        is_log_only = bool(self.note) and not self.record.place
        if not is_over and not is_log_only and not values:
            return self.request("resume")
        return self.resume_as(ResumeRequest(values=values, is_forced=force, is_trusted=trust))

    def resume_as(self, request: ResumeRequest) -> str:
        """Resume a job that has ended, or whose cluster has ended; see ``resume``."""
        return resume_job(self, request)

    def stop(self, now: bool = False) -> str:
        """Stop the job after its next step with a checkpoint; with ``now``, stop immediately."""
        self._latest()
        if self.status in TERMINAL_STATUSES and not self._feed.lost:
            # This is not an error, because the job may have ended while the user typed the command.
            return f"{self.record.job_id} has already {ENDED[self.status]}"
        return self.request("stop", now=now)

    def checkpoint(self) -> str:
        """Write a checkpoint after the next step; training continues."""
        return self.request("checkpoint")

    def scale(self, min: int | None = None, max: int | None = None) -> str:
        """Change the minimum or maximum number of workers; an omitted limit is kept."""
        return self.request("scale", min=min, max=max)

    def preempt(self, worker: str | None = None, notice_s: float = 120) -> str:
        """Preempt a worker as a spot market does, with a notice of ``notice_s`` seconds."""
        if not notice_s >= 0:
            raise ConfigError(f"notice_s={notice_s} must be 0 or more", hint="notice_s=120")
        return self.request("preempt", worker=worker, notice_s=notice_s)

    def kill(self, worker: str | None = None, how: str = "worker") -> str:
        """Kill a worker, or inject another fault into it, without notice.

        Args:
            worker: Its name; by default the coordinator chooses a worker that is training.
            how: ``worker`` kills the worker process; ``kill`` (SIGKILL), ``segfault`` and ``exit``
                terminate its trainer; ``stop`` (SIGSTOP), ``hold_gil`` and ``hang`` block the
                trainer without terminating it.
        """
        if how == "worker":
            return self.request("kill", worker=worker)
        return self.request("fault", worker=worker, kind=how)

    def chaos(
        self,
        mtbf_s: float = 15.0,
        mode: str = "mix",
        duration_s: float | None = None,
        seed: int | None = None,
        *,
        off: bool = False,
    ) -> str:
        """Inject random faults from now on, to test that training survives them.

        Args:
            mtbf_s: Mean time between two faults, in seconds.
            mode: One kind of fault, or ``mix``.
            duration_s: Time in seconds after which to stop; by default at the end of the job.
            seed: Random seed; the same seed produces the same faults.
            off: Stop injecting faults.
        """
        if off:
            return self.request("chaos", off=True)
        return self.request("chaos", mtbf_s=mtbf_s, mode=mode, duration_s=duration_s, seed=seed)

    def handle_request(self, request: str, args: Mapping[str, Any]) -> str:
        """Handle a dashboard button; unlike ``request``, this can resume an ended job."""
        return self.resume() if request == "resume" else self.request(request, **args)

    def request(self, request: str, **args: Any) -> str:
        """Send a request to the coordinator and return its message.

        Raises:
            JobLostError: If the cluster has ended.
            EtrainError: If the job has ended.
            PoolError: If the coordinator refuses, or does not respond in time.
        """
        self._latest()
        status, job_id = self.status, self.record.job_id
        # A lost job also has the status failed, but needs a different message; see below.
        if status in TERMINAL_STATUSES and not self._feed.lost:
            raise EtrainError(
                f"job {job_id} has {ENDED[status]}: there is "
                f"{_NOTHING_TO.get(request, f'nothing to {request}')}. "
                "%etrain ls lists the running jobs."
            )
        if self._link is None or self._feed.lost:
            raise JobLostError(
                f"{request} cannot reach job {job_id}: {self._feed.lost}. {self._describe_saved()}"
            )
        try:
            outcome = self._link.call(
                ControlJob(job_id=job_id, request=request, args=args), timeout=REQUEST_S
            )
        except NoAnswerError as exc:
            # A timeout is not a refusal, because the request may still be in the scheduler's queue.
            raise PoolError(
                f"{request} was sent to job {job_id}, but its scheduler did not respond within "
                f"{REQUEST_S:g} s. It may still carry out the request: check %etrain show before "
                "you repeat it."
            ) from exc
        return outcome.message

    def _send_request(self, request: str, args: dict[str, Any]) -> None:
        # Ignore the reply, because the effect is visible in the events.
        if self._link is not None:
            control = ControlJob(job_id=self.record.job_id, request=request, args=args)
            self._link.send(control, timeout=REQUEST_S)
