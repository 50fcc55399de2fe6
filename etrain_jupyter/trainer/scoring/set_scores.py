"""Predict data.eval in parts on all ranks, gather the records, and score them.

A pass is evaluated in parts, so any interruption costs at most the parts of lost ranks::

    predict   each rank evaluates parts into its spool       stops for a planned change
    merge     ranks 0 and 1 store the records of all parts
    score     one of them runs ``eval.score`` in a process; training continues
    collect   before the next pass, the job's end, or a decision: all ranks wait for the scores

Each generation begins with an exchange of what the ranks hold, and continues where the previous
one stopped.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from etrain_jupyter.rules.samples.eval_parts import (
    NUM_KEEPERS,
    PartPlan,
    ScoreStatus,
    choose_receivers,
    choose_scorer,
    cut_parts,
    plan_parts,
)
from etrain_jupyter.trainer.control.faults import Places
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.data import evaluation_share
from etrain_jupyter.trainer.group.gathering import gather_json, stream
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.micro_batch import MicroBatch
from etrain_jupyter.trainer.scoring.exhibits import Exhibit
from etrain_jupyter.trainer.scoring.records import pack_records
from etrain_jupyter.trainer.scoring.score_process import ScoreError, Scorer, Scoring
from etrain_jupyter.trainer.scoring.spool import RecordFile, Spool
from etrain_jupyter.trainer.seeds import seed_all
from etrain_jupyter.trainer.state.train_state import ScorePass, TrainState
from etrain_jupyter.wire.messages import EvalScoreFound, EvalScoreLost, ExhibitFound, TextLogged

POLL_S = 0.02
"""Interval at which ranks that wait for scores exchange their state."""

LOG_WAIT_S = 10.0
"""After this many seconds, ranks log that they are waiting for scores."""

SHARE_BYTES = 64 << 20
"""Maximum size of the parts that all ranks exchange before a planned change."""

IsPending = Callable[[], bool]


class _Layout(NamedTuple):
    """Positions of parts in a stream, in the order of data.eval."""

    lengths: dict[int, int]
    """Number of bytes by part."""
    starts: dict[int, int]
    """Position of each part that this rank sends."""

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths.values())


class SetScores:
    """The passes of ``eval.predict`` and ``eval.score`` of one job on one rank.

    All methods run in the main thread. Methods that take a group are collectives.
    """

    def __init__(
        self, state: TrainState, *, micro: MicroBatch, scorer: Scorer, send: Send, places: Places
    ) -> None:
        self._state = state
        self._micro = micro
        self._scorer = scorer
        self._send = send
        self._places = places
        self._pass = ScorePass()
        """The pass to which the following fields belong."""
        self._spool: Spool | None = None
        self._records: RecordFile | None = None
        self._scoring: Scoring | None = None
        self._scoring_since = 0.0
        self.record: dict[str, Any] | None = None
        """Fields of ``events.EvalScored``; None until this rank knows the scores."""

    # --- the phases of a pass ---

    def resume(self, group: RankGroup, is_pending: IsPending) -> bool:
        """At the start of a generation, continue a complete pass whose scores may be missing.

        Returns:
            False if a planned change interrupted it.
        """
        state = self._state
        # A rank may have left the previous generation before it began the newest pass:
        #
        #     rank 0   commit 40 ── begin (40, g3) ── predict ── (rank 2 is lost)
        #     rank 1   commit 40 ── (rank 2 is lost) ── generation 4: joins (40, g3)
        newest = max(ScorePass(*row) for row in gather_json(group, list(state.score_pass)))
        if newest != state.score_pass:
            state.score_pass, state.is_scored = newest, False
        # A pass that is not complete is continued by the evaluation, which is still due.
        if not newest.step or newest.step != state.evaluated_step:
            return True
        rows = self._exchange(group)
        if any(row["is_scored"] for row in rows):
            self._finish([row["record"] for row in rows])
            return True
        if self._restart(group, rows):
            return True
        if state.step == state.score_pass.step:
            return self.predict(group, is_pending)
        if group.rank == 0:
            step = state.score_pass.step
            self._send(EvalScoreLost(generation=group.generation, step=step))
        self._finish([])
        return True

    def begin(self, group: RankGroup) -> None:
        """Begin a pass over the current weights, unless it has begun in an earlier generation."""
        state = self._state
        if state.score_pass.step != state.step:
            state.score_pass, state.is_scored = ScorePass(state.step, group.generation), False

    def predict(self, group: RankGroup, is_pending: IsPending) -> bool:
        """Evaluate the missing parts, merge all parts and start to score them.

        Returns:
            False if a planned change interrupted it; the next generation continues.
        """
        rows = self._exchange(group)
        if any(row["is_scored"] for row in rows):
            self._finish([row["record"] for row in rows])
            return True
        if self._restart(group, rows):
            return True
        parts = cut_parts(self._state.plan.num_eval, self._part_size)
        plan = plan_parts([row["parts"] for row in rows], len(parts))
        if not self._evaluate(group, parts, plan, is_pending):
            return False
        self._merge(group, len(parts))
        if group.rank == 0:
            self._start(group)
        return True

    def collect(self, group: RankGroup, is_pending: IsPending) -> bool:
        """Wait until the scores of the newest pass are known on all ranks.

        Returns:
            False if a planned change interrupted it.
        """
        # All ranks must agree, and this rank may know the scores before the others do.
        if self._is_settled(group):
            return True
        log_at = time.monotonic() + LOG_WAIT_S
        while True:
            self.poll(group)
            flags = torch.tensor([float(self.record is not None), float(is_pending())])
            group.all_reduce(flags).wait()
            if flags[0]:
                break
            if flags[1]:
                return False
            self._reach(group)
            if group.rank == 0 and time.monotonic() >= log_at:
                log_at = math.inf
                step = self._pass.step
                text = f"waiting for eval.score, which is scoring the evaluation of step {step}"
                self._send(TextLogged(level="info", text=text))
            time.sleep(POLL_S)
        self._finish(gather_json(group, self.record))
        return True

    def poll(self, group: RankGroup) -> None:
        """Report the scores if they have just been computed on this rank.

        Raises:
            ScoreError: If ``score`` failed.
        """
        if self._scoring is None or self.record is not None:
            return
        try:
            scores = self._scoring.poll()
        except ScoreError as exc:
            message = f"{exc} (scoring the evaluation of step {self._pass.step})"
            raise ScoreError(message, exc.user_traceback) from None
        if scores is None:
            return
        self._check_names(scores)
        state = self._state
        self._learn(
            {
                "step": self._pass.step,
                "samples": state.plan.num_eval,
                "scores": scores,
                "duration_s": time.monotonic() - self._scoring_since,
                "time": time.time(),
            }
        )
        state.is_scored = True
        self.report(group.generation)

    def _learn(self, record: dict[str, Any]) -> None:
        # The ranks receive the record at different steps. Each rank keeps it, and rank 0 of each
        # generation sends the records missing from the log. The coordinator ignores duplicates.
        if record != self.record:
            self.record = record
            self._send({"step": self._state.step, "scored": record})

    def report(self, generation: int) -> None:
        """Report the scores, if this rank knows them."""
        # The report is repeated at the start of each generation, because the rank that sent it may
        # have died. The coordinator ignores duplicates.
        if self.record is not None and self._pass == self._state.score_pass:
            self._send(EvalScoreFound(generation=generation, record=self.record))

    def close(self) -> None:
        """Stop a run of ``score``, and delete the records."""
        if self._scoring is not None:
            self._scoring.stop()
            self._scoring = None
        for file in (self._spool, self._records):
            if file is not None:
                file.close()
        self._spool = self._records = None

    # --- what the ranks hold ---

    def _adopt_pass(self) -> None:
        # The records of another pass belong to other weights.
        if self._pass != self._state.score_pass:
            self.close()
            self._pass, self.record = self._state.score_pass, None

    def _exchange(self, group: RankGroup) -> list[dict[str, Any]]:
        self._adopt_pass()
        mine = {
            "is_scored": self._state.is_scored,
            "record": self.record,
            "status": ScoreStatus(
                has_result=self.record is not None,
                is_scoring=self._scoring is not None,
                has_records=self._records is not None,
            ),
            "parts": sorted(self._spool.lengths) if self._spool is not None else [],
            "sizes": [self._records.num_bytes, self._records.num_records]
            if self._records is not None
            else None,
        }
        return gather_json(group, mine)

    def _is_settled(self, group: RankGroup) -> bool:
        state = self._state
        if not state.score_pass.step:
            return True
        self._adopt_pass()
        rows = gather_json(group, {"is_scored": state.is_scored, "record": self.record})
        if all(row["is_scored"] for row in rows):
            self._finish([row["record"] for row in rows])
            return True
        return False

    def _restart(self, group: RankGroup, rows: list[dict[str, Any]]) -> bool:
        """Continue to score merged records; return False if no rank holds them."""
        ranks = [ScoreStatus(*row["status"]) for row in rows]
        scorer = choose_scorer(ranks)
        if scorer is None:
            return False
        receivers = choose_receivers(ranks)
        if receivers:
            self._copy(group, rows, receivers)
        if group.rank == scorer and self._scoring is None:
            self._start(group)
        return True

    def _finish(self, records: Iterable[dict[str, Any] | None]) -> None:
        found = next((record for record in records if record is not None), None)
        self._state.is_scored = True
        self.close()
        if found is None:
            self.record = None
        else:
            self._learn(found)

    # --- predict ---

    @property
    def _part_size(self) -> int:
        # The size is the same on all ranks in all generations. With ``batch.micro: auto``, each
        # rank has its own micro-batch size, and splits a part into as many batches as necessary.
        size = None if self._micro.is_auto else self._micro.size
        return size or self._state.plan.global_batch_size

    def _evaluate(
        self, group: RankGroup, parts: list[range], plan: PartPlan, is_pending: IsPending
    ) -> bool:
        # The ranks sum a flag with every part and read it one part later, when it has arrived, so
        # that all of them stop after the same part (see ``loop.evaluation``).
        if self._spool is None:
            self._spool = Spool()
        todo = plan.todo[group.rank]
        packed = self._pack_parts([parts[part] for part in todo])
        pending, sending = torch.zeros(1), None
        with self._state.workload.evaluating():
            for turn in range(max(map(len, plan.todo))):
                if sending is not None:
                    sending.wait()
                if pending > 0:
                    self._share_parts(group, len(parts))
                    return False
                pending = torch.tensor([float(is_pending())])
                sending = group.all_reduce(pending)
                self._reach(group)
                if turn < len(todo):
                    self._spool.add(todo[turn], next(packed))
                group.raise_if_failed()
        if sending is not None:
            sending.wait()  # no collective may be in flight when the next one begins
        return True

    def _pack_parts(self, parts: list[range]) -> Iterator[list[bytes]]:
        size = self._micro.size or self._part_size
        batches = [
            [part[first : first + size] for first in range(0, len(part), size)] for part in parts
        ]
        pieces = self._predict([batch for part in batches for batch in part])
        for part in batches:
            yield list(itertools.islice(pieces, len(part)))

    def _predict(self, batches: list[range]) -> Iterator[bytes]:
        workload, seed, step = self._state.workload, self._state.config.seed, self._state.step
        assert workload.eval is not None
        shares = (evaluation_share(part, job_seed=seed, step=step) for part in batches)
        fetched = workload.eval.batches(shares)
        for samples, (_, batch) in zip(batches, fetched, strict=True):
            # Seeded by the position in the set, so that any rank would draw the same numbers.
            seed_all(seed, step=step, rank=samples.start)
            yield pack_records(workload.predict_batch(batch), samples)

    # --- merge ---

    def _merge(self, group: RankGroup, num_parts: int) -> None:
        assert self._spool is not None
        layout = self._lay_out(group, num_parts)
        records = None
        if group.rank < NUM_KEEPERS:
            records = RecordFile(layout.num_bytes, self._state.plan.num_eval)
        fill = functools.partial(self._spool.fill, layout.starts)
        self._stream_into(group, layout.num_bytes, fill, records)

    def _lay_out(self, group: RankGroup, num_parts: int) -> _Layout:
        assert self._spool is not None
        mine = {str(part): length for part, length in self._spool.lengths.items()}
        rows = gather_json(group, mine)
        owners = plan_parts([{int(part) for part in row} for row in rows], num_parts).owners
        lengths = {part: int(rows[owner][str(part)]) for part, owner in owners.items()}
        ends = dict(zip(lengths, itertools.accumulate(lengths.values()), strict=True))
        starts = {p: ends[p] - lengths[p] for p, owner in owners.items() if owner == group.rank}
        return _Layout(lengths, starts)

    def _share_parts(self, group: RankGroup, num_parts: int) -> None:
        """Copy all parts to all ranks, because any of them may be about to leave."""
        assert self._spool is not None
        layout, spool = self._lay_out(group, num_parts), self._spool
        # A leaving rank must not wait for long. Above the limit, the parts of a rank that leaves
        # are evaluated again instead.
        if group.world_size == 1 or layout.num_bytes > SHARE_BYTES:
            return
        done = 0

        def take(window: memoryview) -> None:
            nonlocal done
            spool.write(window, done)
            done += len(window)

        stream(group, layout.num_bytes, functools.partial(spool.fill, layout.starts), take)
        spool.register(layout.lengths)

    def _copy(self, group: RankGroup, rows: list[dict[str, Any]], receivers: list[int]) -> None:
        source = next(rank for rank, row in enumerate(rows) if row["sizes"])
        num_bytes, num_records = rows[source]["sizes"]
        held = self._records
        records = RecordFile(num_bytes, num_records) if group.rank in receivers else None

        def fill(position: int, window: memoryview) -> None:
            if group.rank == source and held is not None:
                held.fill(position, window)

        self._stream_into(group, num_bytes, fill, records)

    def _stream_into(
        self,
        group: RankGroup,
        num_bytes: int,
        fill: Callable[[int, memoryview], None],
        records: RecordFile | None,
    ) -> None:
        # ``_records`` is set only once the file is complete, because a peer may be lost in the
        # meantime.
        try:
            stream(group, num_bytes, fill, records.append if records is not None else None)
        except BaseException:
            if records is not None:
                records.close()
            raise
        self._records = records or self._records

    # --- score ---

    def _start(self, group: RankGroup) -> None:
        assert self._records is not None
        # The exhibits are sent before the scores are known here, so that a log with the scores also
        # contains the exhibits.
        send = functools.partial(self._send_exhibit, group.generation, self._pass.step)
        self._scoring = self._scorer.start(self._records, send)
        self._scoring_since = time.monotonic()

    def _send_exhibit(self, generation: int, step: int, exhibit: Exhibit) -> None:
        self._send(
            ExhibitFound(
                generation=generation,
                step=step,
                name=exhibit.name,
                format=exhibit.format,
                data=exhibit.data,
            )
        )

    def _check_names(self, scores: dict[str, float]) -> None:
        workload = self._state.workload
        taken = {"loss", *workload.measures.names, *workload.whole_set} & scores.keys()
        if taken:
            raise ScoreError(
                f"eval.score returned {', '.join(map(repr, sorted(taken)))}, which is also the "
                "loss or a metric of the evaluation. Return it under another name."
            )

    def _reach(self, group: RankGroup) -> None:
        step = self._state.step
        self._places.reach("eval", rank=group.rank, step=step, phase="evaluating")
