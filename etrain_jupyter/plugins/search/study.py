"""One study in the kernel: its trials, its best job, and requests to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from etrain_jupyter.display.tables import data_frame
from etrain_jupyter.errors import ConfigError, EtrainError, JobLostError, JobNotFoundError
from etrain_jupyter.notebook.job.cluster_location import find_cluster
from etrain_jupyter.notebook.job.job_record import Recorded, RunRecord
from etrain_jupyter.notebook.job.link import JobLink
from etrain_jupyter.notebook.job.open_jobs import hold
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.search import folder as names
from etrain_jupyter.plugins.search.figures import (
    Importance,
    check_kind,
    describe_missing,
    draw,
    evaluate_importance,
)
from etrain_jupyter.plugins.search.report import StudyView, TrialRow, render_html, render_text
from etrain_jupyter.plugins.search.spec import StopStudy
from etrain_jupyter.untrusted import plain_line

if TYPE_CHECKING:
    import optuna
    from pandas import DataFrame
    from plotly.graph_objects import Figure

POLL_S = 0.25
"""Interval in seconds between two reads of Optuna's journal."""
BEGIN_S = 60.0
"""Timeout in seconds for the scheduler to create the journal of a new study."""

Resume = Callable[["Study", int], JobLink]


class Study(Recorded):
    """A search over hyper-parameters, whose trials are jobs.

    It belongs to its cluster, as a job does: ``attach_study`` finds it again in another kernel.

    Args:
        record: Its record in the run store.
        link: Connection to its scheduler; None if that has ended.
        resume: Submits the study again.
    """

    def __init__(self, record: RunRecord, link: JobLink | None, resume: Resume) -> None:
        self.record = record
        self._link = link
        self._resume = resume
        self._optuna: optuna.Study | None = None

    @property
    def optuna(self) -> optuna.Study:
        """The study in Optuna, for its plots and its importance of parameters.

        Raises:
            EtrainError: If Optuna is not installed, or the study has not begun.
        """
        package = names.import_optuna()
        deadline = time.monotonic() + BEGIN_S
        while self._optuna is None:
            try:
                with self._readable():
                    storage = names.open_for_reading(self.record.folder)
                self._optuna = package.load_study(study_name=self.id, storage=storage)
            except (FileNotFoundError, KeyError) as exc:
                if self._is_gone() or time.monotonic() >= deadline:
                    raise EtrainError(
                        f"study {self.id} has not begun: {self.record.folder} contains no trials. "
                        "%etrain doctor shows whether its cluster is alive."
                    ) from exc
                time.sleep(POLL_S)
        return self._optuna

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Replace the error of a folder that is damaged, or that no scheduler has written."""
        try:
            yield
        except (EtrainError, FileNotFoundError):
            raise
        # Optuna applies each line as it is.
        except Exception as exc:
            raise EtrainError(
                f"study {self.id} cannot be read: {names.STUDY_FILE} or {names.JOURNAL_FILE} in "
                f"{self.record.folder} is damaged ({type(exc).__name__}: "
                f"{plain_line(str(exc), 100)}). Its trials are ordinary jobs: %etrain ls."
            ) from exc

    def view(self) -> StudyView:
        """Return the study's current state."""
        study = self.optuna
        with self._readable():
            return self._view_of(study)

    def _view_of(self, study: Any) -> StudyView:
        attributes = study.user_attrs
        status = str(attributes.get(names.STATUS, "running"))
        reason = str(attributes.get(names.REASON, ""))
        if status == "running" and self._is_gone():
            status, reason = "lost", "its cluster has ended; study.resume() continues it"
        elif status == "running":
            reason = names.StudyLease.read_trouble(self.record.folder)
        search = self.record.config["search"]
        return StudyView(
            name=self.name,
            study_id=self.id,
            status=status,
            reason=reason,
            metric=str(search["metric"]),
            mode=str(search["mode"]),
            num_trials=int(attributes.get(names.NUM_TRIALS, 0)),
            num_samples=int(attributes.get(names.NUM_SAMPLES, 0)),
            rungs=tuple(map(int, attributes.get(names.RUNGS, ()))),
            trials=tuple(_rows_of(study.get_trials(deepcopy=False))),
        )

    def evaluate_importance(self) -> Importance:
        """Return the importance of the parameters, or why it is unknown."""
        study = self.optuna
        with self._readable():
            return evaluate_importance(
                study.get_trials(deepcopy=False),
                mode=self.record.config["search"]["mode"],
                rungs=study.user_attrs.get(names.RUNGS, ()),
            )

    @property
    def importance(self) -> dict[str, float]:
        """The share of each parameter in the differences between good and other trials.

        The shares sum to 1, the most important parameter first. Optuna compares the complete
        trials, or if these are fewer than 10, the values of all trials at the first rung.

        Raises:
            EtrainError: If it is unknown, for example because there are fewer than 10 trials.
        """
        importance = self.evaluate_importance()
        if importance.reason:
            raise EtrainError(describe_missing(importance, self.id))
        return dict(importance.shares)

    def _is_gone(self) -> bool:
        """Return whether no scheduler runs the study, although it has not ended."""
        if self._link is None or find_cluster(self.record.cluster, self.record.host).has_ended:
            return True
        # An existing Dask scheduler has no files that show whether it has ended, and if it is
        # restarted, it has no record of the study. While it runs the study, it holds the lease.
        is_external = not self.record.cluster.get("state_dir")
        return is_external and names.StudyLease.is_free(self.record.folder)

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped``, ``failed``, or ``lost`` if its cluster ended."""
        return self.view().status

    @property
    def trials(self) -> DataFrame:
        """The trials as a data frame: one row each, with a column for each name of the space.

        Raises:
            ConfigError: If pandas is not installed.
        """
        rows = [
            {
                "number": row.number,
                "state": row.state,
                "value": row.value,
                **row.params,
                "samples": row.samples,
                "job": row.job_id,
                "reason": row.reason,
            }
            for row in self.view().trials
        ]
        return data_frame(rows, otherwise="study.view().trials")

    @property
    def best_params(self) -> dict[str, Any]:
        """The values of the best trial; see ``best_job``."""
        return dict(self._best().params)

    @property
    def best_value(self) -> float:
        """The metric of the best trial; see ``best_job``."""
        return self._best().value

    @property
    def best_job(self) -> TrainingJob:
        """The job of the best complete trial; while none is complete, of the best running one.

        Raises:
            JobNotFoundError: If no trial has a value yet.
        """
        return self.job(self._best().number)

    def job(self, number: int) -> TrainingJob:
        """Return the job of a trial.

        Raises:
            JobNotFoundError: If the trial has no job.
        """
        return hold(RunStore(self.record.folder.parent).find(f"{self.id}-{number:03d}"))

    def _best(self) -> TrialRow:
        view = self.view()
        if view.best is None:
            raise JobNotFoundError(
                f"no trial of study {self.id} has a value yet: it is {view.status}, with "
                f"{len(view.trials)} of {view.num_trials} trials begun."
            )
        return view.best

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the study has ended, and return its status.

        Args:
            timeout: Timeout in seconds; None to wait without limit.

        Raises:
            TimeoutError: If the study has not ended by then; it continues.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (view := self.view()).status == "running":
            if time.monotonic() >= deadline:
                done = sum(trial.state != "RUNNING" for trial in view.trials)
                raise TimeoutError(
                    f"study {self.id} has not ended within {timeout:g} s: {done} of "
                    f"{view.num_trials} trials. It continues."
                )
            time.sleep(POLL_S)
        return view.status

    def stop(self) -> str:
        """Stop the study; its running trials save checkpoints and can be resumed.

        Raises:
            JobLostError: If its cluster has ended.
            PoolError: If it is not running.
        """
        if self._is_gone():
            raise JobLostError(f"the cluster of study {self.id} has ended, so it is not running.")
        assert self._link is not None
        try:
            return f"study {self.name} {self._link.call(StopStudy(study_id=self.id)).message}"
        finally:
            self._link.release()

    def resume(self, trials: int = 0) -> str:
        """Continue a stopped study from its trials' checkpoints, or an ended one with more trials.

        Args:
            trials: Trials to add.

        Raises:
            ConfigError: If the study is running, or has ended and no trials are added.
        """
        view = self.view()
        if view.status == "running":
            raise ConfigError(f"study {self.id} is running", hint="stop it first: study.stop()")
        unfinished = any(trial.state == "RUNNING" for trial in view.trials)
        total = view.num_trials + trials
        if trials < 0 or (total <= len(view.trials) and not unfinished):
            raise ConfigError(
                f"all {len(view.trials)} trials of study {self.id} have ended",
                hint="study.resume(trials=10) adds trials",
            )
        ended_at = self._ended_at()
        self._link = self._resume(self, total)
        # Until the scheduler has opened the journal, the status is that of the previous end.
        deadline = time.monotonic() + BEGIN_S
        while time.monotonic() < deadline:
            if self.view().status == "running" or self._ended_at() != ended_at:
                break
            time.sleep(POLL_S)
        return f"study {self.name} continues, with {total} trials in total"

    def _ended_at(self) -> float:
        return float(self.optuna.user_attrs.get(names.ENDED_AT, 0.0))

    def plot(self, kind: str = "curves") -> Figure:
        """Return a plotly figure, which ``optuna.visualization`` has drawn.

        Args:
            kind: ``curves`` for the curve of each trial, ``history`` for the values and the best
                one so far, ``parallel`` for one line per trial over the parameters and the metric,
                ``importance`` for the importance of the parameters, ``slice`` for the metric over
                each parameter, or ``contour`` for the metric over each two of them.

        Raises:
            ConfigError: If plotly is not installed, or the kind is unknown.
            EtrainError: If there are too few trials for this figure.
        """
        check_kind(kind)
        study, importance = self.optuna, self.evaluate_importance()
        if kind == "importance" and importance.reason:
            raise EtrainError(describe_missing(importance, self.id))
        search = self.record.config["search"]
        with self._readable():
            return draw(kind, study, importance, metric=search["metric"], mode=search["mode"])

    def __repr__(self) -> str:
        return render_text(self.view())

    def _repr_html_(self) -> str:
        return render_html(self.view(), self.evaluate_importance())


def _rows_of(trials: list[Any]) -> Iterator[TrialRow]:
    for trial in trials:
        if trial.state.name == "WAITING":
            continue
        curve = tuple(sorted((int(x), float(y)) for x, y in trial.intermediate_values.items()))
        last = curve[-1] if curve else (0, math.nan)
        yield TrialRow(
            number=trial.number,
            state=trial.state.name,
            params=dict(trial.params),
            value=last[1],
            samples=max(last[0], int(trial.user_attrs.get(names.SAMPLES, 0))),
            reason=str(trial.user_attrs.get(names.REASON, "")),
            job_id=str(trial.user_attrs.get(names.JOB, "")),
            curve=curve,
        )
