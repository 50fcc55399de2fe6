"""Weights are hashed in the background, from a copy of their boundary (review R5)."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from etrain_jupyter.trainer.state import background_digest, capture, pieces
from etrain_jupyter.trainer.state.background_digest import BackgroundDigest
from etrain_jupyter.trainer.state.capture import digest_of


class Tied(nn.Module):
    """Tied weights, weights in another memory format, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(30, 40)
        self.out = nn.Linear(30, 40)
        self.out.weight = self.into.weight
        self.turned = nn.Parameter(torch.randn(20, 10).t())
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("empty", torch.empty(0))


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def beats() -> list[int]:
    return []


@pytest.fixture
def hashing(told: list[str], beats: list[int]) -> BackgroundDigest:
    return BackgroundDigest(lambda: beats.append(1), told.append)


def test_digest_is_of_the_moment_and_the_same_as_in_the_foreground(
    hashing: BackgroundDigest, told: list[str]
) -> None:
    model = Tied()
    expected = []
    for _ in range(3):  # the memory of the copy is reused
        expected.append(digest_of(model))
        hashing.begin(model, told.append)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    hashing.finish()
    assert told == expected
    assert len(set(told)) == 3


def test_other_tensors_change_the_digest(hashing: BackgroundDigest, told: list[str]) -> None:
    model, average = Tied(), torch.zeros(3)
    for change in (0, 0, 1):
        average[1] += change
        hashing.begin(model, told.append, others={"ema.into.bias": average})
    hashing.finish()

    assert told[0] == told[1] != told[2]
    assert digest_of(model) not in told


def test_copy_and_wait_send_heartbeats(
    hashing: BackgroundDigest,
    told: list[str],
    beats: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(capture, "PIECE_BYTES", 1000)
    monkeypatch.setattr(background_digest, "WAIT_S", 0.01)
    may_end = threading.Event()

    def tell(digest: str) -> None:
        assert may_end.wait(30)
        told.append(digest)

    model = nn.Linear(100, 100)
    hashing.begin(model, tell)
    assert len(beats) >= 34, "one for each piece of the copy"
    threading.Timer(0.2, may_end.set).start()
    before = len(beats)
    hashing.finish()
    assert told == [digest_of(model)]
    # It sent heartbeats while the thread made progress, and none while it stalled.
    assert before < len(beats) < before + 50


def test_without_memory_for_a_copy_the_weights_are_hashed_at_once(
    hashing: BackgroundDigest,
    told: list[str],
    beats: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    model = Tied()
    monkeypatch.setattr(torch, "empty", refuse)
    hashing.begin(model, told.append)
    assert told == [digest_of(model)]
    assert beats


def test_error_in_the_thread_is_logged(
    hashing: BackgroundDigest, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise ValueError("no such thing")

    monkeypatch.setattr(background_digest, "digest_of_tensors", fail)
    hashing.begin(Tied(), lambda digest: pytest.fail("nothing to tell"))
    hashing.finish()
    assert told == ["the weights could not be hashed (ValueError: no such thing)"]
