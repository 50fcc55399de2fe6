"""Batches are pinned for CUDA devices only, by the thread or the loader that prepares them."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.trainer import data as data_module
from etrain_jupyter.trainer.data import ItemSource, Share, open_samples
from etrain_jupyter.trainer.prefetch import NUM_AHEAD, Ahead, pin, to_device, uses_pinned_memory

Pair = namedtuple("Pair", "x y")


@pytest.fixture
def pinned_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that pinned a tensor; pinning itself needs a device."""
    threads: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(data_module, "_SMALL_BYTES", 0)
    return threads


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", True), ("cpu", False)])
def test_memory_is_pinned_for_cuda_only(device: str, expected: bool) -> None:
    assert uses_pinned_memory(torch.device(device)) is expected


def test_all_dense_tensors_of_a_batch_are_pinned(pinned_by: list[str]) -> None:
    x = torch.arange(3)
    sparse = torch.eye(2).to_sparse()

    batch = pin({"pair": Pair(x, ["text", x]), "sparse": sparse, "number": 4})

    assert len(pinned_by) == 2
    assert batch["pair"].x is not x
    assert torch.equal(batch["pair"].y[1], x)
    assert (batch["pair"].y[0], batch["number"]) == ("text", 4)
    assert batch["sparse"] is sparse


def test_copies_to_the_device_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, **options: calls.append((device, options))
    )

    to_device([torch.zeros(1)], torch.device("cuda:0"))

    assert calls == [(torch.device("cuda:0"), {"non_blocking": True})]


def opened(data: Any, **options: Any) -> Any:
    return open_samples(data, name="data.train", collate=None, **{"num_workers": 0, **options})


@pytest.mark.parametrize("pins_memory", [True, False])
def test_rows_are_pinned_by_the_thread_that_gathers_them(
    pinned_by: list[str], pins_memory: bool
) -> None:
    source = opened((torch.arange(6), torch.arange(6)), pins_memory=pins_memory)
    try:
        [(_, (x, _))] = source.batches([Share([4, 1])])
    finally:
        source.close()

    assert x.tolist() == [4, 1]
    assert pinned_by == ["etrain-batches_0"] * (2 if pins_memory else 0)


@pytest.mark.parametrize("pins_memory", [True, False])
def test_rows_of_shards_are_pinned_by_the_thread_that_gathers_them(
    pinned_by: list[str], pins_memory: bool, tmp_path: Any
) -> None:
    write_shards({"x": np.arange(9)}, tmp_path / "set", progress=False)
    source = opened(Shards(tmp_path / "set"), pins_memory=pins_memory)
    try:
        [(_, batch)] = source.batches([Share([4, 1])])
    finally:
        source.close()

    assert batch["x"].tolist() == [Shards(tmp_path / "set")[i]["x"] for i in (4, 1)]
    assert pinned_by == ["etrain-batches_0"] * (1 if pins_memory else 0)


@pytest.mark.parametrize("pins_memory", [True, False])
def test_loader_processes_get_the_choice(pins_memory: bool) -> None:
    source = ItemSource([(1, 2)], list, 1, pins_memory=pins_memory)

    assert source._loader is not None
    assert source._loader.pin_memory is pins_memory
    source.close()


PATIENCE_S = 30


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    made = Ahead()
    yield made
    made.close()


@given(st.lists(st.integers()))
def test_results_come_in_order(items: list[int]) -> None:
    ahead = Ahead()
    try:
        assert list(ahead.map(lambda item: item + 1, items)) == [item + 1 for item in items]
    finally:
        ahead.close()


def test_next_batches_are_prepared_while_one_is_used(ahead: Ahead) -> None:
    prepared = [threading.Event() for _ in range(6)]
    threads = set()

    def prepare(item: int) -> int:
        threads.add(threading.current_thread().name)
        prepared[item].set()
        return item

    results = ahead.map(prepare, range(6))
    assert next(results) == 0

    for event in prepared[: 1 + NUM_AHEAD]:
        assert event.wait(PATIENCE_S)  # without another call of ``next``
    assert threads == {"etrain-batches_0"}
    assert list(results) == [1, 2, 3, 4, 5]


def test_items_are_consumed_by_the_caller_and_not_before_they_are_needed(ahead: Ahead) -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(10):
            taken.append((item, threading.current_thread()))
            yield item

    results = ahead.map(lambda item: item, items())
    assert taken == []
    next(results)

    assert taken == [(item, threading.current_thread()) for item in range(1 + NUM_AHEAD)]


def test_error_is_raised_where_its_batch_is_due(ahead: Ahead) -> None:
    results = ahead.map(lambda item: 6 // item, [3, 2, 0, 1])

    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(ahead.map(abs, [-1])) == [1]


def test_batches_of_a_generation_that_ended_are_not_prepared(ahead: Ahead) -> None:
    is_released, prepared = threading.Event(), []

    def prepare(item: int) -> int:
        if item:
            is_released.wait(PATIENCE_S)
        prepared.append(item)
        return item

    results = ahead.map(prepare, range(6))
    next(results)
    results.close()
    is_released.set()

    assert list(ahead.map(prepare, [7])) == [7]
    assert 2 not in prepared


# ---------------------------------------------------------------------------------------- sources


SHARES = [Share([3, 80, 4], 1), Share([5], 2), Share([6, 7], 3), Share([1, 2], 4), Share([0], 5)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("set") / "shards"
    rows = {"x": np.arange(180.0).reshape(90, 2), "label": np.arange(90)}
    write_shards(rows, folder, block_bytes=200, progress=False)
    return Shards(folder)


def noisy(sample: dict[str, Any]) -> torch.Tensor:
    assert threading.current_thread() is threading.main_thread()
    return torch.from_numpy(sample["x"]) + torch.rand(())


def drawn_with(source: Any) -> list[torch.Tensor]:
    """Return the numbers that a model draws while it trains on the batches of a source."""
    torch.manual_seed(3)
    return [torch.rand(2) for _ in source.batches(SHARES)]


@pytest.mark.parametrize("kind", ["shards", "shards with transform", "large tensors"])
def test_random_numbers_of_the_model_do_not_depend_on_the_thread(
    kind: str, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "_SMALL_BYTES", 0)
    data = {
        "shards": shards,
        "shards with transform": Shards(shards.path, transform=noisy),
        "large tensors": (torch.arange(180.0).reshape(90, 2), torch.arange(90)),
    }[kind]
    source = open_samples(data, name="data.train", collate=None, num_workers=0)
    torch.manual_seed(3)
    expected = [torch.rand(2) for _ in SHARES]

    try:
        for found, numbers in zip(drawn_with(source), expected, strict=True):
            assert torch.equal(found, numbers)
    finally:
        source.close()


@pytest.mark.parametrize(("num_bytes", "name"), [(0, "etrain-batches_0"), (1 << 30, "MainThread")])
def test_only_large_batches_are_gathered_by_the_thread(
    num_bytes: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "_SMALL_BYTES", num_bytes)
    x, y = torch.randn(90, 2), torch.arange(90)
    source = open_samples((x, y), name="data.train", collate=None, num_workers=0)
    threads, gather = set(), source._gather

    def gather_there(share: Share) -> Any:
        threads.add(threading.current_thread().name)
        return gather(share)

    monkeypatch.setattr(source, "_gather", gather_there)
    try:
        for (rows, batch), share in zip(source.batches(SHARES), SHARES, strict=True):
            assert rows.tolist() == share.indices
            assert torch.equal(batch[0], x[rows])
            assert torch.equal(batch[1], y[rows])
    finally:
        source.close()
    assert threads == {name}


def test_no_share_gives_no_batch() -> None:
    source = open_samples((torch.arange(3), torch.arange(3)), name="x", collate=None, num_workers=0)

    assert list(source.batches([])) == []
    source.close()
