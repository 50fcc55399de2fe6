"""What a person may ask of a job that runs: each request is a sentence back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etrain_jupyter.errors import ConfigError, EtrainError, JobLostError, PoolError
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.job.feed import EventFeed
from etrain_jupyter.notebook.job.history import LatestValues
from etrain_jupyter.notebook.job.link import JobLink, NoAnswerError
from etrain_jupyter.notebook.job.run_store import JobRecord
from etrain_jupyter.wire.requests import ControlJob

if TYPE_CHECKING:
    from etrain_jupyter.notebook.job.resume import ResumeRequest

REQUEST_S = 30.0
"""How long the coordinator may take to answer."""

_NOTHING_TO = {
    "chaos": "no worker left to disturb",
    "fault": "no worker left to disturb",
    "kill": "no worker left to kill",
    "preempt": "no worker left to preempt",
    "checkpoint": "nothing left to save",
}

_ENDED = {"finished": "finished", "stopped": "been stopped", "failed": "failed"}


class JobRequests(ABC):
    """The half of a job that asks its coordinator for something."""

    record: JobRecord
    """What the run store says of it."""
    _link: JobLink | None
    """The line to its cluster; None if there is no such cluster any more."""
    _feed: EventFeed
    _view: LatestValues

    @property
    @abstractmethod
    def status(self) -> str:
        """One of submitted, waiting, running, paused, finished, stopped, failed."""

    @property
    @abstractmethod
    def note(self) -> str:
        """Why only its log is followed from here; empty where its cluster can be asked."""

    def pause(self) -> str:
        """Let the ranks wait after their next step, with their state."""
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
        """Go on after ``pause``, or after the end of the job or of its cluster.

        An ended job goes on from its newest checkpoint: the same job, with the same log and curve.

        Args:
            pool: Where its workers come from now; without it, the same pool.
            min: Fewest workers from now on.
            max: Most workers from now on.
            epochs: Times through the training data, all in all.
            steps: Steps all in all, instead.
            force: Go on even if what differs changes the curve.
            trust: Go on even if somebody else submitted the job: its code runs as you.

        Raises:
            ConfigError: If that does not fit the job, or nothing is left to train.
            UntrustedJobError: If you did not submit it, as far as this machine knows.
            EtrainError: If it is being trained.
        """
        given = {"pool": pool, "min": min, "max": max, "epochs": epochs, "steps": steps}
        values = {key: value for key, value in given.items() if value is not None}
        is_over = self.status in TERMINAL_STATUSES or self._feed.lost or self._feed.trouble
        is_log_only = bool(self.note) and not self.record.place
        if not is_over and not is_log_only and not values:
            return self.request("resume")
        from etrain_jupyter.notebook.job.resume import ResumeRequest

        return self.resume_as(ResumeRequest(values=values, is_forced=force, is_trusted=trust))

    @abstractmethod
    def resume_as(self, wish: ResumeRequest) -> str:
        """Resume an ended job with these wishes."""

    def stop(self, now: bool = False) -> str:
        """End the job after its next step with a checkpoint; with ``now`` at once, without."""
        if self.status in TERMINAL_STATUSES and not self._feed.lost:
            return f"{self.record.job_id} has {_ENDED[self.status]} already"
        return self.request("stop", now=now)

    def checkpoint(self) -> str:
        """Write a checkpoint after the next step; training goes on."""
        return self.request("checkpoint")

    def scale(self, min: int | None = None, max: int | None = None) -> str:
        """Change the bounds of the number of workers; what is left out stays."""
        return self.request("scale", min=min, max=max)

    def preempt(self, worker: str | None = None, notice_s: float = 120) -> str:
        """Take a worker away as a spot market does: with a notice of ``notice_s`` seconds."""
        if not notice_s >= 0:
            raise ConfigError(f"notice_s={notice_s}: a notice is 0 s or more", hint="notice_s=120")
        return self.request("preempt", worker=worker, notice_s=notice_s)

    def kill(self, worker: str | None = None, how: str = "worker") -> str:
        """Put a worker out of action without notice: a fault on purpose.

        Args:
            worker: Its name; by default the coordinator chooses one that trains.
            how: ``worker`` ends its process; ``kill`` (SIGKILL), ``segfault`` and ``exit`` end its
                trainer; ``stop`` (SIGSTOP), ``hold_gil`` and ``hang`` leave that alive and useless.
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
        """Let faults happen at random from now on, to see that nothing comes of it.

        Args:
            mtbf_s: Mean time between two faults.
            mode: One kind of fault, or ``mix``.
            duration_s: When it ends; by default with the job.
            seed: Repeats the faults of a run with the same seed.
            off: End it now.
        """
        if off:
            return self.request("chaos", off=True)
        return self.request("chaos", mtbf_s=mtbf_s, mode=mode, duration_s=duration_s, seed=seed)

    def obey(self, request: str, args: Mapping[str, Any]) -> str:
        """Do what a button of the screen asks for; an ended job can be resumed there, too."""
        return self.resume() if request == "resume" else self.request(request, **args)

    def request(self, request: str, **args: Any) -> str:
        """Ask the coordinator for something and return what it says to that.

        Raises:
            JobLostError: If the cluster is gone.
            EtrainError: If the job has ended.
            PoolError: If the coordinator refuses, or does not answer in time.
        """
        status, job_id = self.status, self.record.job_id
        if status in TERMINAL_STATUSES and not self._feed.lost:
            raise EtrainError(
                f"job {job_id} has {_ENDED[status]}: there is "
                f"{_NOTHING_TO.get(request, f'nothing to {request}')}. "
                "%etrain ls shows the jobs that run."
            )
        if self._link is None or self._feed.lost:
            raise JobLostError(
                f"{request} cannot reach job {job_id}: {self._feed.lost}. {self._what_remains()}"
            )
        try:
            outcome = self._link.call(
                ControlJob(job_id=job_id, request=request, args=args), timeout=REQUEST_S
            )
        except NoAnswerError as exc:
            raise PoolError(
                f"{request} was sent to job {job_id}, and its scheduler did not answer within "
                f"{REQUEST_S:g} s. It may still happen, as soon as the scheduler answers: look at "
                "%etrain show before you ask again."
            ) from exc
        return outcome.message

    def _send_request(self, request: str, args: dict[str, Any]) -> None:
        if self._link is not None:
            control = ControlJob(job_id=self.record.job_id, request=request, args=args)
            self._link.send(control, timeout=REQUEST_S)

    def _what_remains(self) -> str:
        if not self._view.saved_step:
            return "Nothing was saved."
        return (
            f"The weights of step {self._view.saved_step} are saved in {self.record.where}; "
            "job.load_into(model) loads them."
        )
