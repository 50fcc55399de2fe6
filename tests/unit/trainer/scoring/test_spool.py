"""Parts on disk, merged window by window."""

from __future__ import annotations

import itertools
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.spool import RecordFile, Spool, write_all

PARTS = st.lists(st.binary(max_size=20), min_size=1, max_size=12)


@given(parts=PARTS, order=st.randoms(), window=st.integers(1, 30), num_ranks=st.integers(1, 4))
def test_windows_of_all_ranks_add_up_to_all_parts_in_order(
    parts: list[bytes], order: random.Random, window: int, num_ranks: int
) -> None:
    numbers = list(range(len(parts)))
    order.shuffle(numbers)
    spools = [Spool() for _ in range(num_ranks)]
    for number in numbers:
        spools[number % num_ranks].add(number, [parts[number][:3], parts[number][3:]])
    starts = [0, *itertools.accumulate(map(len, parts))]
    merged = RecordFile(starts[-1], len(parts))

    for position in range(0, starts[-1], window):
        data = bytearray(min(window, starts[-1] - position))
        for rank, spool in enumerate(spools):
            mine = {part: starts[part] for part in spool.lengths}
            assert all(part % num_ranks == rank for part in mine)
            spool.fill(mine, position, memoryview(data))
        merged.append(memoryview(data))

    everything = bytearray(starts[-1])
    merged.fill(0, memoryview(everything))
    assert everything == b"".join(parts)
    for file in (*spools, merged):
        file.close()


def test_files_have_no_name() -> None:
    records = RecordFile(3, 1)
    records.append(memoryview(b"abc"))

    assert os.fstat(records.fileno()).st_nlink == 0
    records.close()


def test_a_full_disk_is_named() -> None:
    message = "No space left on device.*set TMPDIR"
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(WorkloadError, match=message):
        write_all(full, b"records")
