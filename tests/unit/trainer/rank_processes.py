"""Rank processes for tests of what generations compute. They are started once and reused.

The history of a job is a list of generations, each with its members and its last step. There is no
coordinator: the processes know the history and coordinate through a store.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.boundary import Boundary, BoundaryHooks
from etrain_jupyter.trainer.control.faults import FaultInjector
from etrain_jupyter.trainer.control.reporter import Report
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.scoring.exhibits import result_of
from etrain_jupyter.trainer.scoring.records import unpack_all
from etrain_jupyter.trainer.scoring.score_process import Scoring, SendExhibit
from etrain_jupyter.trainer.scoring.spool import RecordFile
from etrain_jupyter.trainer.state.capture import digest_of, put_state, take_state
from etrain_jupyter.trainer.state.train_state import TrainState, WorkPlan
from etrain_jupyter.trainer.workload import build_workload
from etrain_jupyter.wire.messages import EvalFinished, EvalScoreFound

HOST = "127.0.0.1"
PARTS = ("data_s", "compute_s", "communication_s", "optimizer_s")
_PRELOAD = ["etrain_jupyter.trainer.loop.train_loop", "torch._dynamo"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation of processes that train together."""

    members: tuple[int, ...]
    """Numbers of processes, in the order of their ranks."""
    until: int | None = None
    """Last step of the generation, which ends as planned; None for the end of the job."""
    lost: int | None = None
    """Rank that is lost in the middle of the step after ``until``, which is then undone."""
    lost_at: str = "all_reduce"
    """Place at which it is lost; ``eval`` for the second batch of the evaluation of ``until``."""
    told_in_eval: int | None = None
    """Rank that learns of a planned change at the second batch of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, and the generations that train it."""

    config: dict[str, Any]
    names: Callable[[], dict[str, Any]]
    """Returns the notebook's objects by key; importable."""
    history: Sequence[Generation]
    faults: Sequence[dict[str, Any]] = ()


@dataclass(kw_only=True)
class Outcome:
    """Result of a job in one process."""

    digest: str
    sent: list[Report]
    """All messages to the coordinator."""
    ends: list[str]
    """Reason for the end of each of its generations."""
    model: dict[str, torch.Tensor]
    """The state of the model."""

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of steps or evaluations, without timings."""
        timing = ("time", "generation", "samples_per_s", "duration_s", "world_size", *PARTS)
        records = [r for r in self.sent if isinstance(r, dict) and "scored" not in r]
        kinds = {"eval": EvalFinished, "score": EvalScoreFound}
        if kind in kinds:
            records = [sent.record for sent in self.sent if isinstance(sent, kinds[kind])]
        return [{k: v for k, v in record.items() if k not in timing} for record in records]


class RankProcesses:
    """Processes that wait for jobs."""

    def __init__(self, count: int) -> None:
        # Forked from a process with torch loaded and no threads, so that they start at once.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        self._count = count
        self._num_jobs = 0
        self._start()

    def _start(self) -> None:
        self._pipes, self._processes = [], []
        for me in range(self._count):
            mine, its = self._context.Pipe()
            args = (me, self._store.port, self._folder.name, its)
            process = self._context.Process(target=_serve, args=args)
            process.start()
            its.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def train(self, job: Job) -> list[Outcome]:
        """Train a job and return the results of the members of its last generation, by rank."""
        self._num_jobs += 1
        members = sorted({m for generation in job.history for m in generation.members})
        for member in members:
            self._pipes[member].send((f"job{self._num_jobs}", job))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(members):
            due = {self._pipes[m]: m for m in members if m not in outcomes}
            for pipe in wait(list(due)):
                outcome = pipe.recv()
                if not isinstance(outcome, Outcome):
                    told = [
                        outcome,
                        f"members {sorted(outcomes)} had come to their ends",
                        *self._what_the_others_say(set(due) - {pipe}),
                    ]
                    self._stop()  # the other processes may wait for it forever
                    self._start()
                    raise AssertionError("\n\n".join(told))
                outcomes[due[pipe]] = outcome
        return [outcomes[member] for member in job.history[-1].members]

    def _what_the_others_say(self, pipes: set[Any]) -> list[str]:
        """Return the tracebacks of other processes: the first to arrive may be a consequence."""
        told = []
        while pipes and (ready := wait(list(pipes), timeout=5.0)):
            for pipe in ready:
                pipes.discard(pipe)
                with contextlib.suppress(EOFError):
                    outcome = pipe.recv()
                    told.append(str(outcome) if isinstance(outcome, str) else "one came to its end")
        return told

    def _stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            pipe.close()

    def close(self) -> None:
        """Kill the processes."""
        self._stop()
        self._folder.cleanup()


def _serve(me: int, port: int, folder: str, pipe: Any) -> None:
    store = dist.TCPStore(HOST, port, None, False, wait_for_workers=False)
    with contextlib.suppress(EOFError):
        while True:
            key, job = pipe.recv()
            try:
                pipe.send(_Member(me, store, key, job, Path(folder)).run())
            except BaseException:
                pipe.send(traceback.format_exc())


class _Rendezvous(dist.PrefixStore):
    def abort(self) -> None:
        """Do nothing: no thread waits in it after the group has formed."""


class _Lost(FaultInjector):
    """Fails the generation in the middle of a step or of the evaluation after it."""

    def __init__(self, group: RankGroup, until: int, place: str) -> None:
        super().__init__([], lambda _: None)
        self._group, self._until, self._place = group, until, place
        self._num_batches = 0

    def at(self, place: str, *, rank: int, step: int) -> None:
        self._num_batches += place == "eval" and step == self._until
        is_in_eval = self._place == "eval" and self._num_batches == 2
        is_there = place == self._place == "all_reduce"
        if is_in_eval or (is_there and step == self._until + 1):
            self._group.abort("lost by fault injection")
            raise CommunicationError("lost by fault injection")


class _ToldInEval(FaultInjector):
    """Reports a planned change during an evaluation."""

    def __init__(self, pending: threading.Event) -> None:
        super().__init__([], lambda _: None)
        self._pending, self._num_batches = pending, 0

    def at(self, place: str, *, rank: int, step: int) -> None:
        self._num_batches += place == "eval"
        if self._num_batches == 2:
            self._pending.set()


class _AfterStep(BoundaryHooks):
    """Calls a function after each step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def after_step(self, boundary: Boundary) -> None:
        self._call()


class _Member:
    """One process of a job."""

    def __init__(self, me: int, store: dist.Store, key: str, job: Job, folder: Path) -> None:
        self._me = me
        self._key, self._folder = key, folder
        self._store = dist.PrefixStore(key, store)
        self._job, self._history = job, job.history
        self._ends: list[str] = []
        config = TrainConfig.model_validate(job.config)
        names = job.names()
        self._sent: list[Report] = []
        self._workload = build_workload(config, _Names(names), torch.device("cpu"))
        plan = WorkPlan.of(config, self._workload)
        state = TrainState(self._workload, config, plan)
        scorer = SameProcessScorer(names["eval.score"]) if config.eval.score else None
        self._loop = TrainLoop(state, self._sent.append, scorer=scorer)
        self._loop.warm_up()

    def run(self) -> Outcome:
        try:
            for number, generation in enumerate(self._history):
                if self._me in generation.members:
                    self._live(number, generation)
        finally:
            self._loop.close()
        model = {k: v.clone() for k, v in self._workload.model.state_dict().items()}
        return Outcome(
            digest=digest_of(self._workload.model), sent=self._sent, ends=self._ends, model=model
        )

    def _live(self, number: int, generation: Generation) -> None:
        group = RankGroup(
            generation=number + 1,
            rank=generation.members.index(self._me),
            world_size=len(generation.members),
            store=_Rendezvous(f"g{number}", self._store),
            host=HOST,
        )
        if number and self._me not in self._history[number - 1].members:
            self._catch_up(number - 1)
        group.form()
        if generation.lost is not None:
            threading.Thread(target=self._watch, args=(group, f"abort{number}")).start()
        loop = self._loop
        loop.change_pending.clear()
        loop.places.faults = self._faults(generation, group)
        self._notice(generation)
        try:
            hooks = _AfterStep(lambda: self._notice(generation))
            self._ends.append(loop.run(group, loop.wrap(group), hooks))
        except CommunicationError:
            assert generation.lost is not None, f"{generation} failed at step {loop.step}"
            self._ends.append("failed")
            self._store.set(f"abort{number}", b"1")
        group.close()
        saver = self._saver_of(number)
        if self._me == saver:
            self._save(number)
        elif generation.lost is not None and self._is_behind(number, saver):
            self._catch_up(number)

    def _watch(self, group: RankGroup, key: str) -> None:
        """Abort when a rank has failed, in place of the coordinator."""
        while not self._store.check([key]):
            time.sleep(0.01)
        group.abort()

    def _faults(self, generation: Generation, group: RankGroup) -> FaultInjector:
        if generation.lost == group.rank and generation.until is not None:
            return _Lost(group, generation.until, generation.lost_at)
        if generation.told_in_eval == group.rank:
            return _ToldInEval(self._loop.change_pending)
        return FaultInjector(self._job.faults, lambda _: None)

    def _notice(self, generation: Generation) -> None:
        if generation.lost is None and self._loop.step + 1 == generation.until:
            self._loop.change_pending.set()

    def _saver_of(self, number: int) -> int | None:
        if number + 1 == len(self._history):
            return None
        present = self._history[number].members
        staying = [m for m in self._history[number + 1].members if m in present]
        if self._history[number].lost is not None:
            # A lost rank may have been one step ahead of other ranks.
            self._store.set(f"step{number}-{self._me}", str(self._loop.step))
            staying.sort(key=lambda m: -self._step_of(number, m))
        return staying[0] if staying else present[0]

    def _step_of(self, number: int, member: int) -> int:
        key = f"step{number}-{member}"
        self._store.wait([key], timedelta(seconds=60))
        return int(self._store.get(key))

    def _is_behind(self, number: int, saver: int | None) -> bool:
        return (
            saver is not None
            and self._me in self._history[number + 1].members
            and self._loop.step < self._step_of(number, saver)
        )

    def _save(self, number: int) -> None:
        state = take_state(self._workload.model, self._workload.optimizer, self._workload.extras)
        file = self._folder / f"{self._key}-{number}"
        torch.save((*state, self._loop.state.counters()), file)
        self._store.set(f"saved{number}", str(file))

    def _catch_up(self, number: int) -> None:
        self._store.wait([f"saved{number}"], timedelta(seconds=60))
        file = self._store.get(f"saved{number}").decode()
        header, tensors, counters = torch.load(file)
        put_state(
            self._workload.model,
            self._workload.optimizer,
            header,
            tensors,
            self._workload.extras,
        )
        self._loop.state.set_counters(counters)


class SameProcessScorer:
    """Scores in this process, at the second poll."""

    def __init__(self, score: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._score = score

    def start(self, records: RecordFile, send: SendExhibit) -> Scoring:
        with open(os.dup(records.fileno()), "rb") as file:
            file.seek(0)
            result = result_of(self._score(list(unpack_all(file, records.num_bytes))))
        for exhibit in result.exhibits:
            send(exhibit)
        return _Scored(result.scores)


class _Scored:
    def __init__(self, scores: dict[str, float]) -> None:
        self._scores = scores
        self._num_polls = 0

    def poll(self) -> dict[str, float] | None:
        self._num_polls += 1
        return self._scores if self._num_polls > 1 else None

    def stop(self) -> None:
        """Do nothing: nothing is running."""


class _Names:
    """An opened bundle."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def evaluate(self, key: str) -> Any:
        return self._names[key]


@contextlib.contextmanager
def rank_processes(count: int) -> Iterator[RankProcesses]:
    """Start processes for the tests of a module."""
    processes = RankProcesses(count)
    try:
        yield processes
    finally:
        processes.close()
