"""Drive one study: ask for values, run trials as jobs, report their evaluations, and end poor ones.

::

    Optuna (thread) ── values ──▶ driver ── JobSpec ──▶ coordinator ──▶ ordinary job
           ▲                        │ ▲                                     │
           └── evaluation, end ─────┘ └───────── events of the job ─────────┘
                    └── prune ──▶ the job stops at the next step boundary; its workers are shared

Optuna's journal is the study's only durable state. A restarted scheduler finds each trial there
with its job's id and what the trial has reported; everything else follows from the job's log.

A disk that rejects writes (full, read-only, failing) does not end a study. The driver repeats the
rejected call on each tick, and the trials continue to train. Calls can be repeated, because each
call also completes what a previous scheduler left unfinished when it died during that call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.services import ServiceHost
from etrain_jupyter.head.jobs.job_log import describe_refusal, remedy_of
from etrain_jupyter.log import events
from etrain_jupyter.log.event_log import LOG_FILE, read_events
from etrain_jupyter.log.events import TERMINAL_STATUSES, JobStatusChanged
from etrain_jupyter.plugins.search.folder import JOURNAL_FILE
from etrain_jupyter.plugins.search.optuna_study import OptunaStudy, StoredTrial
from etrain_jupyter.plugins.search.rules import (
    StudyProgress,
    StudyShare,
    StudyVerdict,
    TrialState,
    judge_study,
    num_to_start,
)
from etrain_jupyter.plugins.search.spec import StudySpec
from etrain_jupyter.plugins.search.trial import Trial, TrialEvaluation, is_usable
from etrain_jupyter.rules.membership import stimuli as s

logger = logging.getLogger("etrain.coordinator")

TICK_S = 0.25
"""Interval in seconds between checks of the budget, and of trials that could not start."""
RETRY_S = 5.0
"""Seconds until a trial whose folder could not be written is tried again."""

T = TypeVar("T")


class StudyDriver:
    """Drive one study on the scheduler's event loop.

    Args:
        spec: The study.
        host: Runs the trials.
        on_end: Called once the study has ended, and its end is stored.
        on_trouble: Called with a text for the user when the journal cannot be written, and with an
            empty text once it is written again.
    """

    def __init__(
        self,
        spec: StudySpec,
        host: ServiceHost,
        *,
        on_end: Callable[[StudyDriver], None],
        on_trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.spec = spec
        self.verdict: StudyVerdict | None = None
        """The study's end; None while the study continues."""
        self._host = host
        self._on_end, self._on_trouble = on_end, on_trouble
        self._trials: dict[int, Trial] = {}
        self._by_job: dict[str, Trial] = {}
        self._news: list[tuple[Trial, TrialEvaluation]] = []
        self._changed = asyncio.Event()
        # Setting the clock while the study runs must not use up its time budget.
        self._began_at = clock.from_wall(spec.created) if spec.created else clock.now()
        # One thread, so that Optuna's calls happen one at a time and never block the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="etrain-optuna")
        self._optuna: OptunaStudy | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=spec.study_id)

    # --- called by the coordinator ---

    def take_events(self, job_id: str, new: Sequence[events.Event]) -> None:
        """Handle new events of a job, if it is a trial of this study."""
        trial = self._by_job.get(job_id)
        if trial is None:
            return
        self._news += [(trial, found) for found in trial.progress.apply_all(new)]
        for event in new:
            if isinstance(event, JobStatusChanged) and event.status in TERMINAL_STATUSES:
                trial.ended_as = event.status
        if self._news or trial.ended_as:
            self._changed.set()

    def stop(self, reason: str) -> None:
        """End the study; its running trials stop with checkpoints, and can be resumed."""
        if self.verdict is None:
            self.verdict = StudyVerdict(status="stopped", reason=reason)
        self._changed.set()

    @property
    def share(self) -> StudyShare:
        """The study's rule for sharing workers, with its running trials, best first."""
        sign = -1.0 if self.spec.config.mode == "max" else 1.0
        running = [t for t in self._trials.values() if t.state == "RUNNING"]
        # Trials without a value come last, in order of their start.
        ranked = sorted(
            running,
            key=lambda t: (t.latest is None, sign * (t.latest or 0.0), t.number),
        )
        return StudyShare(
            sharing=self.spec.config.sharing, ranking=tuple(trial.job_id for trial in ranked)
        )

    # --- the loop ---

    async def _run(self) -> None:
        try:
            self._optuna = await self._call(OptunaStudy, self.spec)
            while not self._host.is_ready:
                await asyncio.sleep(TICK_S)
            await self._recover()
            while self.verdict is None:
                await self._advance()
                await self._wait()
            await self._end(self.verdict)
        except Exception as exc:
            logger.exception("study %s failed", self.spec.study_id)
            self.verdict = StudyVerdict(status="failed", reason=f"{type(exc).__name__}: {exc}")
            self._stop_jobs()
            if self._optuna is not None:
                with contextlib.suppress(FileNotFoundError):
                    await self._call(self._optuna.end, self.verdict)
        finally:
            self._thread.shutdown(wait=False)
            self._on_end(self)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), TICK_S)
        self._changed.clear()

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        call = functools.partial(function, *args, **kwargs)
        trouble = ""
        while True:
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, call)
            except FileNotFoundError:
                raise  # the folder was deleted
            except OSError as exc:
                if not trouble:
                    what = describe_refusal(exc, self.spec.folder)
                    trouble = (
                        f"{JOURNAL_FILE} cannot be written: {what}; running trials continue, and "
                        f"no trial starts or ends until then; {remedy_of(exc)}"
                    )
                    logger.error("study %s: %s", self.spec.study_id, trouble)
                    self._on_trouble(trouble)
            else:
                if trouble:
                    self._on_trouble("")
                return found
            if self.verdict is not None:
                self._stop_jobs()  # the user need not wait for the disk
            await asyncio.sleep(TICK_S)

    @property
    def _store(self) -> OptunaStudy:
        assert self._optuna is not None
        return self._optuna

    async def _advance(self) -> None:
        await self._report_news()
        for trial in self._running():
            if trial.ended_as:
                await self._settle(trial)
        states = [trial.state for trial in self._trials.values()]
        budget = self.spec.config.budget
        self.verdict = self.verdict or judge_study(self._progress(states), budget)
        if self.verdict is not None:
            return
        concurrent = self.spec.config.concurrent or self._default_concurrency()
        missing = num_to_start(
            states,
            num_trials=self.spec.num_trials,
            concurrent=concurrent,
            num_leaving=self._num_leaving(),
        )
        for _ in range(missing):
            new = await self._call(self._store.ask)
            trial = Trial(number=new.number, values=new.values, job_id=new.job_id)
            self._trials[trial.number] = trial
            await self._start(trial)
        for trial in self._running():
            if not trial.is_started and not trial.ended_as and time.monotonic() >= trial.retry_at:
                await self._start(trial)

    def _num_leaving(self) -> int:
        # ::
        #
        #     pruned trial    decided ── last step ── checkpoint ── ended
        #     its successor     values, folder, log ......... waits ── trainers start
        #
        # TPE learns from each trial's end, so its next values are chosen after that.
        if self.spec.config.method == "tpe":
            return 0
        return sum(trial.is_prune_sent for trial in self._running())

    def _default_concurrency(self) -> int:
        workers = self.spec.template["data"].get("workers")
        least = workers.get("min", 1) if isinstance(workers, dict) else 1
        return max(1, self._host.capacity // (least if isinstance(least, int) else 1))

    def _running(self) -> list[Trial]:
        return [trial for trial in self._trials.values() if trial.state == "RUNNING"]

    def _progress(self, states: list[TrialState]) -> StudyProgress:
        trials = self._trials.values()
        failures = [trial.reason for trial in trials if trial.state == "FAIL"]
        return StudyProgress(
            states=tuple(states),
            num_trials=self.spec.num_trials,
            samples=sum(trial.num_samples for trial in trials),
            elapsed_s=clock.now() - self._began_at,
            usd=sum(trial.progress.usd for trial in trials),
            last_failure=failures[-1] if failures else "",
        )

    # --- trials ---

    async def _start(self, trial: Trial, *, resumes: bool = False) -> None:
        """Start a trial's job; a configuration that cannot be built fails only this trial."""
        try:
            config = self.spec.build_config(trial.values)
        except ConfigError as exc:
            trial.reason = f"its configuration is not valid: {exc}"
            trial.ended_as = "failed"
            return
        try:
            spec = self.spec.make_job(trial.number, config, resumes=resumes)
            self._by_job[trial.job_id] = trial
            await self._host.host_job(spec)
            trial.is_started = True
        except OSError as exc:
            logger.warning("trial %s did not start, retrying: %s", trial.job_id, exc)
            trial.retry_at = time.monotonic() + RETRY_S

    async def _report_news(self) -> None:
        news, self._news = self._news, []
        for trial, evaluation in news:
            value = evaluation.values.get(self.spec.config.metric)
            if trial.state != "RUNNING" or trial.is_prune_sent:
                continue
            if not is_usable(value):
                # With eval.score, the loss and the scores of one evaluation arrive in two events.
                # The trial fails once it has ended without the metric; see _settle.
                trial.reason = (
                    f"no evaluation reported a finite '{self.spec.config.metric}'; reported: "
                    f"{', '.join(sorted(evaluation.values))}"
                )
                continue
            assert value is not None
            trial.latest = value
            if self._store.rungs is None:
                await self._place_rungs(trial)
            reason = await self._call(self._store.report, trial.number, evaluation.samples, value)
            if reason:
                self._prune(trial, reason)
        if news and self.spec.config.sharing == "promising":
            self._host.after_change()

    async def _place_rungs(self, trial: Trial) -> None:
        plan = trial.progress.plan
        assert plan is not None, "a trainer plans the job before it evaluates"
        config = self.spec.build_config(trial.values)
        every = config.eval.every
        per_unit = {"epochs": plan.num_train_samples, "steps": plan.global_batch_size}
        first = int(every.value * per_unit[every.unit]) if every.unit in per_unit else 1
        await self._call(
            self._store.place_rungs,
            num_samples=plan.total_samples,
            min_samples=min(first, plan.num_train_samples),
        )

    def _prune(self, trial: Trial, reason: str) -> None:
        trial.reason, trial.is_prune_sent = reason, True
        job = self._host.find_job(trial.job_id)
        if job is not None and not job.state.is_ended:
            job.log(events.LogLine, level="info", worker="", text=f"The study stops it: {reason}")
            job.handle(s.StopRequested(now=False))
            self._host.after_change()

    async def _settle(self, trial: Trial) -> None:
        """Store the end of a trial whose job has ended."""
        await self._report_news()
        samples = trial.num_samples
        if trial.ended_as == "finished" and trial.latest is not None:
            await self._tell(trial, "COMPLETE", value=trial.latest, samples=samples)
        elif trial.ended_as in ("finished", "failed"):
            trial.reason = trial.progress.reason or trial.reason or "its job failed"
            await self._tell(trial, "FAIL", samples=samples)
        elif self.verdict is None or self.verdict.status != "stopped":
            trial.reason = trial.reason if trial.is_prune_sent else "stopped by the user"
            await self._tell(trial, "PRUNED", samples=samples)

    async def _tell(
        self, trial: Trial, state: TrialState, *, samples: int, value: float | None = None
    ) -> None:
        reason = "" if state == "COMPLETE" else trial.reason
        await self._call(
            self._store.tell, trial.number, state, value=value, reason=reason, samples=samples
        )
        trial.state = state
        self._by_job.pop(trial.job_id, None)

    # --- recovery and end ---

    async def _recover(self) -> None:
        """Continue the trials that a previous scheduler has begun."""
        for stored in await self._call(self._store.trials):
            if stored.state == "RUNNING" and not stored.job_id:
                # The previous scheduler died while it chose the values.
                stored = await self._call(self._store.complete, stored)
            trial = Trial(
                number=stored.number, values=stored.values, job_id=stored.job_id,
                state=stored.state, reason=stored.reason, samples=stored.samples,
            )  # fmt: skip
            self._trials[trial.number] = trial
            if stored.state == "RUNNING":
                await self._continue(trial, stored)

    async def _continue(self, trial: Trial, stored: StoredTrial) -> None:
        #     job                            what happens
        #     active on this scheduler       follow it (its scheduler died, its trainers did not)
        #     its log ends: finished         store its end
        #     its log ends: stopped          resume it, unless the study had pruned it
        #     its log has no end             resume it: its cluster has ended
        #     no log                         start it: the scheduler died before it was submitted
        log = self.spec.folder.parent / trial.job_id / LOG_FILE
        job = self._host.find_job(trial.job_id)
        past = read_events(log) if log.exists() else []
        ended = [e for e in past if isinstance(e, JobStatusChanged)][-1:]
        is_active = job is not None and not job.state.is_ended
        # No await from here until the job is followed, so no event is missed or taken twice.
        news = trial.progress.apply_all(past)
        if is_active:
            self._by_job[trial.job_id] = trial
            trial.is_started = True
        values = [e.values.get(self.spec.config.metric) for e in news]
        trial.latest = next((v for v in reversed(values) if is_usable(v)), None)
        self._news += [(trial, e) for e in news if e.samples not in stored.reported]
        is_pruned = bool(stored.reason)
        if is_pruned:
            # The previous scheduler may have died after the decision, before it stored the value.
            for e in [e for e in news if e.samples not in stored.reported][:1]:
                value = e.values.get(self.spec.config.metric)
                if is_usable(value):
                    await self._call(self._store.report, trial.number, e.samples, value)
        if is_active:
            if is_pruned:
                self._prune(trial, stored.reason)
        elif ended and ended[0].status in ("finished", "failed"):
            trial.ended_as = ended[0].status
        elif is_pruned:
            trial.ended_as, trial.is_prune_sent = "stopped", True
        else:
            await self._start(trial, resumes=bool(past))

    def _stop_jobs(self) -> None:
        for trial in self._running():
            job = self._host.find_job(trial.job_id)
            if job is not None and not job.state.is_ended:
                job.handle(s.StopRequested(now=False))
        self._host.after_change()

    async def _end(self, verdict: StudyVerdict) -> None:
        """Stop the running trials, wait for their checkpoints, and store the end."""
        for trial in self._running():
            if not trial.is_prune_sent and verdict.status != "stopped":
                trial.reason, trial.is_prune_sent = verdict.reason, True
        self._stop_jobs()
        while any(trial.is_started and not trial.ended_as for trial in self._running()):
            await self._wait()
        for trial in self._running():
            await self._settle(trial)
        await self._call(self._store.end, verdict)
