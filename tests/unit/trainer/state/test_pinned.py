from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from etrain_jupyter.trainer.state import staging
from etrain_jupyter.trainer.state.pinned import pin


class FakeCuda:
    """CUDA's registration of host memory; the tests run without a GPU."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert flags == 0
        if not self.error:
            self.pinned[start] = size
        return self.error

    def cudaHostUnregister(self, start: int) -> int:
        del self.pinned[start]
        return 0


class Owner:
    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_memory_of_the_exact_size_is_pinned_until_its_owner_is_freed(cuda: FakeCuda) -> None:
    owner = Owner(torch.empty(3 << 20, dtype=torch.uint8))

    assert pin(owner.buffer, owner=owner)
    assert cuda.pinned == {owner.buffer.data_ptr(): 3 << 20}

    del owner
    gc.collect()
    assert cuda.pinned == {}


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = 2
    owner = Owner(torch.empty(8, dtype=torch.uint8))

    assert not pin(owner.buffer, owner=owner)
    assert "cannot pin 8 bytes of host memory (CUDA error 2)" in caplog.text

    del owner
    gc.collect()


def test_empty_memory_is_not_pinned(cuda: FakeCuda) -> None:
    empty = torch.empty(0, dtype=torch.uint8)

    assert not pin(empty, owner=Owner(empty))
    assert cuda.pinned == {}


def test_staged_file_of_a_gpu_state_is_pinned(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnDevice(torch.Tensor):
        @property
        def is_cuda(self) -> Any:
            return True

    weight = torch.ones(5).as_subclass(OnDevice)
    file = staging.StagedFile({"w": weight})

    assert cuda.pinned == {file._buffer.data_ptr(): len(file.data)}
