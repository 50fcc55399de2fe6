"""Batches are pinned for CUDA devices only, by the thread or the loader that prepares them."""

from __future__ import annotations

import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.trainer import data as data_module
from etrain_jupyter.trainer.batch_memory import pin, to_device, uses_pinned_memory
from etrain_jupyter.trainer.data import ItemSource, Share, open_samples

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
