"""Audit of a job on shards: the order follows from the layout in the log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from etrain_jupyter.log.events import StepCompleted
from etrain_jupyter.notebook.audit.samples import Work, check_samples
from etrain_jupyter.rules.samples.block_order import BlockLayout, BlockOrder
from etrain_jupyter.rules.samples.ledger import checksum_of, range_at
from tests.unit.log.spent import made

LAYOUT = BlockLayout((30, 30, 30, 10), 2)
SEED, BATCH, NUM_SAMPLES = 5, 16, 100
WORK = Work(seed=SEED, num_samples=NUM_SAMPLES, global_batch_size=BATCH, layout=LAYOUT.encode())


def steps_of(layout: BlockLayout, count: int) -> list[StepCompleted]:
    steps, position = [], 0
    for number in range(1, count + 1):
        due = range_at(position, num_samples=NUM_SAMPLES, global_batch_size=BATCH)
        order = BlockOrder(layout, seed=SEED, epoch=due.epoch)
        trained = order.samples(due.first, due.first + due.samples)
        values: dict[str, Any] = {"generation": 1, "step": number, **due._asdict()}
        values |= {"sample_checksum": checksum_of(trained)}
        steps.append(made(StepCompleted, job_id="j", **values))
        position += due.samples
    return steps


def test_each_epoch_is_proven_from_the_log_alone() -> None:
    rows, problems = check_samples(steps_of(LAYOUT, 14), 0, WORK)

    assert problems == []
    assert [(row.seen_once, row.is_complete) for row in rows] == [(100, True), (100, True)]


@pytest.mark.parametrize("layout", [replace(LAYOUT, window=3), BlockLayout((60, 40), 2)])
def test_steps_in_the_order_of_another_layout_are_found(layout: BlockLayout) -> None:
    rows, problems = check_samples(steps_of(layout, 7), 0, WORK)

    assert problems
    assert rows[0].missing > 0
