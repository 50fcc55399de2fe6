"""Test the figures that are derived from the step logs of a peer's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.step_log import (
    BEGUN,
    COMMITTED,
    UNDONE,
    Change,
    History,
    LogReader,
    StepLog,
    changes,
    sample_losses,
)


def line(what: str, step: int, at: float, **values: Any) -> dict[str, Any]:
    defaults = {"attempt": 1, "rank": 0, "world_size": 2, "pid": 10, "samples": 0, "checksum": 0}
    return {"what": what, "step": step, "time": at, **defaults, **values}


def steps(numbers: range, attempt: int, begin: float, world_size: int = 2) -> list[dict[str, Any]]:
    """Return the lines of rank 0 for one step per second."""
    lines = []
    for place, step in enumerate(numbers):
        group = {"attempt": attempt, "world_size": world_size}
        lines.append(line(BEGUN, step, begin + place, **group))
        lines.append(line(COMMITTED, step, begin + place + 0.5, **group))
    return lines


def test_run_without_faults_wastes_no_step() -> None:
    assert History(steps(range(1, 6), 1, 0.0)).wasted_steps(5) == 0


def test_repeated_and_interrupted_steps_are_wasted() -> None:
    interrupted = line(BEGUN, 8, 7.0)
    history = History([*steps(range(1, 8), 1, 0.0), interrupted, *steps(range(6, 11), 2, 20.0)])

    # Steps 6 and 7 were repeated after a restart; step 8 was interrupted and repeated.
    assert history.num_executed == 13
    assert history.wasted_steps(10) == 3


def test_undone_step_is_not_committed() -> None:
    history = History([line(BEGUN, 1, 0.0), line(UNDONE, 1, 0.5), *steps(range(1, 2), 2, 1.0)])

    assert [done.attempt for done in history.committed()] == [2]
    assert history.wasted_steps(1) == 1


def test_lines_of_two_ranks_make_one_execution_with_the_first_commit_time() -> None:
    history = History(
        [
            line(BEGUN, 1, 0.0, rank=0, pid=10),
            line(BEGUN, 1, 0.1, rank=1, pid=11),
            line(COMMITTED, 1, 0.9, rank=1, pid=11, samples=3, checksum=7),
            line(COMMITTED, 1, 0.8, rank=0, pid=10, samples=2, checksum=5),
        ]
    )

    (done,) = history.committed()
    assert (done.committed_at, done.samples, done.checksum) == (0.8, 5, 12)
    assert done.pids == {0: 10, 1: 11}


def test_change_measures_the_time_without_a_commit_between_two_attempts() -> None:
    history = History([*steps(range(1, 6), 1, 0.0), *steps(range(4, 8), 2, 20.0, world_size=1)])

    assert changes(history) == [
        Change(before=2, after=1, gap_s=16.0, ordinary_s=1.0, steps_again=2)
    ]


def test_samples_of_a_dead_replica_are_lost() -> None:
    whole = line(COMMITTED, 1, 0.0, samples=4, checksum=10)
    half = line(COMMITTED, 2, 1.0, samples=2, checksum=11)
    history = History([whole, half])

    assert sample_losses(history, {1: (4, 10), 2: (4, 26)}) == (2, 0)
    assert sample_losses(history, {1: (4, 10), 2: (4, 26), 3: (4, 1)}) == (6, 0)


def test_checksum_reveals_wrong_samples() -> None:
    history = History([line(COMMITTED, 1, 0.0, samples=4, checksum=11)])

    assert sample_losses(history, {1: (4, 10)}) == (0, 1)


def test_samples_are_counted_in_the_last_execution_of_a_step() -> None:
    first = line(COMMITTED, 1, 0.0, samples=4, checksum=10)
    again = line(COMMITTED, 1, 9.0, attempt=2, samples=4, checksum=10)

    assert sample_losses(History([first, again]), {1: (4, 10)}) == (0, 0)


def test_reader_follows_the_files_and_skips_an_incomplete_line(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.enter(attempt=3, rank=1, world_size=2)
    reader = LogReader(tmp_path)
    log.write(BEGUN, 1)
    assert reader.read().newest_step == 0

    log.write(COMMITTED, 1, indices=[4, 5])
    log.close()
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a", encoding="utf-8") as file:
        file.write('{"what": "com')
    history = reader.read()

    assert history.newest_step == 1
    assert history.newest_attempt() == 3
    assert (history.surviving()[1].samples, history.surviving()[1].checksum) == (2, 9)


def test_empty_run_has_no_attempt() -> None:
    assert History().newest_attempt() is None
    assert changes(History()) == []


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_ranks_share_the_samples_of_a_step_without_overlap(world_size: int) -> None:
    from benchmarks.peers.training import batch_of, share_of

    shares = [share_of(7, rank, world_size) for rank in range(world_size)]

    assert [index for share in shares for index in share] == batch_of(7)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_epoch_contains_every_sample_once() -> None:
    from benchmarks.common.workloads import NUM_SAMPLES
    from benchmarks.peers.training import BATCHES_PER_EPOCH, batch_of

    epoch = [i for step in range(1, BATCHES_PER_EPOCH + 1) for i in batch_of(step)]

    assert sorted(epoch) == list(range(NUM_SAMPLES))
