"""A study in Optuna: it chooses values, decides at rungs, and stores both.

Every method blocks while it writes the journal, so the driver calls them in a thread of its own,
one at a time.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.plugins.search import folder as names
from etrain_jupyter.plugins.search.rules import StudyVerdict, TrialState, place_rungs, rung_of
from etrain_jupyter.plugins.search.schema import Parameter, Value, all_combinations
from etrain_jupyter.plugins.search.spec import StudySpec

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, kw_only=True)
class StoredTrial:
    """One trial as Optuna has stored it."""

    number: int
    state: TrialState
    values: dict[str, Value]
    job_id: str = ""
    """Empty while its values are chosen; then, `OptunaStudy.complete` chooses the rest."""
    reason: str = ""
    reported: dict[int, float] = field(default_factory=dict)
    """Values of the metric by number of samples."""
    samples: int = 0
    """Samples of an ended trial."""


class OptunaStudy:
    """Optuna's part of a study.

    Args:
        spec: The study.
    """

    def __init__(self, spec: StudySpec) -> None:
        self._optuna = names.import_optuna()
        self._spec = spec
        self._config = spec.config
        self._storage = _open_for_writing(self._optuna, spec.folder / names.JOURNAL_FILE)
        self._study: optuna.Study = self._optuna.create_study(
            study_name=spec.study_id,
            storage=self._storage,
            direction="maximize" if self._config.mode == "max" else "minimize",
            load_if_exists=True,
        )
        self._distributions = {
            name: self._distribution(parameter) for name, parameter in spec.parameters.items()
        }
        if self._config.method == "grid":
            grid = all_combinations(spec.parameters) or []
            # Enqueue these first, in order, because a scheduler that died partway has stored a
            # prefix.
            for values in grid[len(self._study.get_trials(deepcopy=False)) :]:
                self._study.enqueue_trial(values)
        self.set_status("running", num_trials=spec.num_trials)

    def _distribution(self, parameter: Parameter) -> Any:
        kinds = self._optuna.distributions
        if parameter.choice is not None:
            return kinds.CategoricalDistribution(parameter.choice)
        low, high = parameter.bounds
        kind = kinds.IntDistribution if parameter.int_range else kinds.FloatDistribution
        return kind(low, high, log=parameter.log)

    @property
    def rungs(self) -> tuple[int, ...] | None:
        """Sample counts of the rungs; None until ``place_rungs``."""
        rungs = self._study.user_attrs.get(names.RUNGS)
        return None if rungs is None else tuple(rungs)

    def place_rungs(self, *, num_samples: int, min_samples: int) -> tuple[int, ...]:
        """Choose the rungs, once the length of a trial is known."""
        rungs = (
            place_rungs(
                num_samples=num_samples, divisor=self._config.divisor, min_samples=min_samples
            )
            if self._config.prunes
            else ()
        )
        self._study.set_user_attr(names.NUM_SAMPLES, num_samples)
        self._study.set_user_attr(names.RUNGS, list(rungs))
        return rungs

    def set_status(self, status: str, reason: str = "", *, num_trials: int = 0) -> None:
        """Store the status of the study."""
        if num_trials:
            self._study.set_user_attr(names.NUM_TRIALS, num_trials)
        self._study.set_user_attr(names.REASON, reason)
        self._study.set_user_attr(names.STATUS, status)

    def trials(self) -> list[StoredTrial]:
        """Return all trials that have begun, in order."""
        waiting = self._optuna.trial.TrialState.WAITING
        return [_stored(t) for t in self._study.get_trials(deepcopy=False) if t.state != waiting]

    def ask(self) -> StoredTrial:
        """Begin a trial: choose its values, and store them with its job's id."""
        for trial in self.trials():
            if not trial.job_id:  # an earlier call could not write all of it
                return self.complete(trial)
        self._study.sampler = self._make_sampler(len(self._study.get_trials(deepcopy=False)))
        return self._begin(self._study.ask(self._distributions))

    def complete(self, begun: StoredTrial) -> StoredTrial:
        """Choose the rest of a trial's values after a scheduler died in ``ask``.

        Returns:
            The trial with the values that ``ask`` would have chosen.
        """
        frozen = self._frozen(begun.number)
        sampler = self._study.sampler = self._make_sampler(begun.number)
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        for name, distribution in self._distributions.items():
            if name in frozen.params:
                # Draw the random numbers of the stored value again, and ignore the result.
                sampler.sample_independent(self._study, frozen, name, distribution)
            else:
                trial._suggest(name, distribution)
        return self._begin(trial)

    def _begin(self, trial: optuna.Trial) -> StoredTrial:
        trial.set_user_attr(names.JOB, self._spec.job_id_of(trial.number))
        return _stored(self._frozen(trial.number))

    def _make_sampler(self, count: int) -> optuna.samplers.BaseSampler:
        # Each trial has its own sampler, whose randomness depends only on the seed and the number
        # of trials. A restarted scheduler therefore neither repeats nor changes its choices.
        seed = (self._config.seed * 1_000_003 + count) % 2**32
        samplers = self._optuna.samplers
        sampler = samplers.TPESampler if self._config.method == "tpe" else samplers.RandomSampler
        return sampler(seed=seed)  # type: ignore[no-any-return]

    def report(self, number: int, samples: int, value: float) -> str:
        """Store an evaluation of a trial; return why the trial is pruned, or an empty string."""
        frozen = self._frozen(number)
        if samples in frozen.intermediate_values:
            return ""
        rungs = self.rungs or ()
        decision = _Decision(self._study)
        is_pruned = False
        # Skip this after the last rung, where Optuna would compare again just before the end.
        if rungs and samples < rungs[0] * self._config.divisor ** len(rungs):
            reported = copy.copy(frozen)
            reported.intermediate_values = {**frozen.intermediate_values, samples: value}
            pruner = make_pruner(self._optuna, rungs, self._config.divisor)
            is_pruned = pruner.prune(decision, reported)
        # Not empty if an earlier call could not write all of its decision to a full disk.
        reason: str = frozen.user_attrs.get(names.REASON, "")
        if is_pruned:
            reason = (
                f"pruned at rung {rung_of(samples, rungs)} of {len(rungs)} with {value:.6g} after "
                f"{samples:,} samples"
            )
            self._storage.set_trial_user_attr(frozen._trial_id, names.REASON, reason)
        for key, reached in decision.attributes.items():
            self._storage.set_trial_system_attr(frozen._trial_id, key, reached)
        # Store this last. If the scheduler dies before this line, the next one finds no value,
        # reports the evaluation again, and so repeats or completes the decision.
        self._storage.set_trial_intermediate_value(frozen._trial_id, samples, value)
        return reason

    def tell(
        self,
        number: int,
        state: TrialState,
        *,
        value: float | None = None,
        reason: str = "",
        samples: int = 0,
    ) -> None:
        """Store the end of a trial."""
        trial_id = self._frozen(number)._trial_id
        self._storage.set_trial_user_attr(trial_id, names.SAMPLES, samples)
        if reason:
            self._storage.set_trial_user_attr(trial_id, names.REASON, reason)
        self._study.tell(number, value, state=self._optuna.trial.TrialState[state])

    def end(self, verdict: StudyVerdict) -> None:
        """Store the end of the study."""
        self.set_status(verdict.status, verdict.reason)
        self._study.set_user_attr(names.ENDED_AT, time.time())

    def _frozen(self, number: int) -> Any:
        return self._study.get_trials(deepcopy=False)[number]


class _Decision:
    """The study as Optuna's pruner sees it; the pruner's writes are collected, not stored.

    The pruner writes the rungs that a trial has reached before it decides. If the scheduler died
    in between, the next one would not decide again, and the trial would reach its next rung.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.get_trials = study.get_trials
        self.direction = study.direction
        self.attributes: dict[str, float] = {}
        """The trial's values at the rungs that it has reached, by Optuna's names."""

    @property
    def _storage(self) -> _Decision:
        return self

    def set_trial_system_attr(self, trial_id: int, key: str, value: float) -> None:
        self.attributes[key] = value


def make_pruner(optuna: Any, rungs: tuple[int, ...], divisor: int) -> Any:
    """Return Optuna's pruner for these rungs."""
    return optuna.pruners.SuccessiveHalvingPruner(
        min_resource=rungs[0], reduction_factor=divisor, min_early_stopping_rate=0
    )


def _open_for_writing(optuna: Any, path: Path) -> optuna.storages.BaseStorage:
    """Open the journal such that a failed write leaves nothing; the caller holds the lease.

    A full disk, or a kill, leaves half a line. The next line would be appended to it, and both
    would be unreadable.
    """
    backend = optuna.storages.journal.JournalFileBackend

    class Journal(backend):  # type: ignore[misc, valid-type]
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            size = _size_of_lines(path)
            try:
                super().append_logs(logs)
            except OSError:
                os.truncate(path, size)
                raise

    return optuna.storages.JournalStorage(Journal(str(path)))  # type: ignore[no-any-return]


def _size_of_lines(path: Path) -> int:
    """Return a file's size, without half a line at its end, which is removed."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return size
        file.seek(0)
        size = file.read().rfind(b"\n") + 1
        file.truncate(size)
    return size


def _stored(trial: Any) -> StoredTrial:
    attributes: Mapping[str, Any] = trial.user_attrs
    return StoredTrial(
        number=trial.number,
        state=trial.state.name,
        values=dict(trial.params),
        job_id=attributes.get(names.JOB, ""),
        reason=attributes.get(names.REASON, ""),
        reported=dict(trial.intermediate_values),
        samples=attributes.get(names.SAMPLES, 0),
    )
