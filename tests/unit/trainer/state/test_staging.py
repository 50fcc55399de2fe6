"""The staged copy of a state has the layout of the file, and is copied once."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from etrain_jupyter.trainer.state import pieces, staging
from etrain_jupyter.trainer.state.packing import StateError
from etrain_jupyter.trainer.state.staging import StagedFile, pin_buffer, stage

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
]


def some_of_each() -> dict[str, torch.Tensor]:
    return {f"{n}.{dtype}": torch.arange(n).to(dtype) for dtype in DTYPES for n in (0, 1, 3)}


def test_plain_safetensors_opens_the_bytes_of_all_types():
    tensors = {**some_of_each(), "scalar": torch.tensor(7.0), "names: ä \"'": torch.ones(2, 3)}
    file = StagedFile(tensors)
    file.take(tensors)

    opened = load(bytes(file.data))

    assert sorted(opened) == sorted(tensors)
    for name, tensor in tensors.items():
        assert opened[name].dtype == tensor.dtype
        assert opened[name].shape == tensor.shape
        assert opened[name].tolist() == tensor.tolist()


def test_header_contains_the_metadata(tmp_path):
    files = stage({"a": {"x": torch.ones(1)}}, {}, {"a": {"format": "pt"}})
    (tmp_path / "a").write_bytes(files["a"].data)
    with safe_open(tmp_path / "a", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_file_without_tensors_opens():
    assert load(bytes(StagedFile({}).data)) == {}


def test_copy_is_contiguous_and_independent_of_training():
    living = torch.arange(6.0).reshape(2, 3).t()
    files = stage({"a": {"x": living}}, {})
    living.zero_()
    assert load(bytes(files["a"].data))["x"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_copy_of_a_large_tensor_is_made_in_pieces_with_heartbeats(monkeypatch):
    """Review R5: a copy that takes longer than the heartbeat timeout is not a hang."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    living = {
        "flat": torch.randn(10_000),
        "turned": torch.randn(70, 40).t(),
        "images": torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
    }
    beats = []

    files = stage({"a": living}, {}, beat=lambda: beats.append(1))

    assert len(beats) >= 40 + 10 + 3 + 1
    for name, value in load(bytes(files["a"].data)).items():
        assert torch.equal(value, living[name])


def test_memory_of_an_earlier_copy_is_reused_where_it_fits():
    first = stage({name: {"x": torch.zeros(2, 3)} for name in "abcd"}, {})
    living = {
        "a": {"x": torch.arange(6.0).reshape(2, 3)},
        "b": {"x": torch.ones(3, 2)},
        "c": {"x": torch.ones(2, 3, dtype=torch.float64)},
        "d": {"y": torch.ones(2, 3)},
    }

    second = stage(living, first)

    assert [second[name] is first[name] for name in "abcd"] == [True, False, False, False]
    for name, tensors in living.items():
        for key, value in load(bytes(second[name].data)).items():
            assert torch.equal(value, tensors[key])


def test_data_is_the_memory_itself_and_not_a_copy():
    file = StagedFile({"x": torch.zeros(2)})
    data = file.data
    file.take({"x": torch.full((2,), 1.5)})
    assert load(bytes(data))["x"].tolist() == [1.5, 1.5]


def test_unsupported_type_is_refused_by_name():
    with pytest.raises(StateError, match=r"model\.w is of type torch\.complex128"):
        StagedFile({"model.w": torch.zeros(1, dtype=torch.complex128)})


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

    assert pin_buffer(owner.buffer, owner=owner)
    assert cuda.pinned == {owner.buffer.data_ptr(): 3 << 20}

    del owner
    gc.collect()
    assert cuda.pinned == {}


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = 2
    owner = Owner(torch.empty(8, dtype=torch.uint8))

    assert not pin_buffer(owner.buffer, owner=owner)
    assert "cannot pin 8 bytes of host memory (CUDA error 2)" in caplog.text

    del owner
    gc.collect()


def test_empty_memory_is_not_pinned(cuda: FakeCuda) -> None:
    empty = torch.empty(0, dtype=torch.uint8)

    assert not pin_buffer(empty, owner=Owner(empty))
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
