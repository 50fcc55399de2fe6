"""Ranges of a part, cut into blocks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import LocalStore, Part
from etrain_jupyter.storage.checkpoints.blocks import PartBlocks, read_blocks
from etrain_jupyter.storage.checkpoints.manifest import parse_manifest
from tests.unit.storage.checkpoints.test_local_store import save


class Memory:
    """A store with the blocks of one part."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_block(self, part: Part, number: int) -> bytes:
        first, stop = part.block_range(number)
        return self.data[first:stop]


@given(st.data())
def test_pieces_of_blocks_are_the_range(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 60))
    block = data.draw(st.integers(1, 20))
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, size))
    digests = ("",) * -(-size // block)
    part = Part(key="k", sha256="", size=size, block_bytes=block, blocks=digests)
    content = bytes(range(size))
    blocks = PartBlocks(Memory(content), part)  # type: ignore[arg-type]
    joined = bytearray(b"?" * (stop - first))
    numbers = []
    for number, (in_block, in_range, count) in blocks.find(first, stop):
        numbers.append(number)
        assert count > 0
        joined[in_range : in_range + count] = blocks.read(number)[in_block : in_block + count]
    assert joined == content[first:stop]
    assert numbers == sorted(set(numbers))


def test_blocks_are_taken_until_one_is_corrupt(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, block_bytes=4)
    part = store.put_part(store.begin(1), "part", b"0123456789")
    blocks = PartBlocks(store, part)
    taken: dict[int, bytes] = {}
    lock = threading.Lock()

    def take(_: PartBlocks, number: int, data: bytes) -> None:
        with lock:
            taken[number] = data

    sizes = list(read_blocks([(blocks, number) for number in (2, 0, 1)], take))
    assert sizes == [2, 4, 4]
    assert taken == {0: b"0123", 1: b"4567", 2: b"89"}

    (tmp_path / part.key).write_bytes(b"0123x56789")
    with pytest.raises(CheckpointError, match="was altered in bytes 4 to 8"):
        list(read_blocks([(blocks, number) for number in (0, 1, 2)], take))


def test_manifest_with_blocks_that_do_not_cover_a_part_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, block_bytes=4)
    manifest = save(store, 3, b"0123456789")
    text = manifest.to_json()
    assert parse_manifest(text, step=3) == manifest
    with pytest.raises(ValueError, match="has 3 digests of blocks"):
        Part(key="k", sha256="", size=13, block_bytes=4, blocks=("", "", ""))
