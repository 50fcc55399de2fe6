"""Slots of a machine: one per GPU, or CPU slots that share the cores."""

from __future__ import annotations

import pytest

from etrain_jupyter.head import slots as slots_module
from etrain_jupyter.head.slots import make_slots


def test_cpu_slots_run_one_thread_each() -> None:
    slots = make_slots([], max_cpu_slots=2)

    assert [(slot.index, slot.device) for slot in slots] == [(0, "cpu"), (1, "cpu")]
    assert slots[0].environment["OMP_NUM_THREADS"] == "1"
    assert slots[0].environment["CUDA_VISIBLE_DEVICES"] == ""


def test_each_gpu_is_a_slot_that_sees_only_this_gpu() -> None:
    slots = make_slots([("GPU-1f", "NVIDIA H200"), ("GPU-2e", "NVIDIA H200")], max_cpu_slots=8)

    assert [slot.device for slot in slots] == ["cuda:0", "cuda:0"]
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["GPU-1f", "GPU-2e"]


def test_slots_of_gpus_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight trainers used to start one thread per core each.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(slots_module, "num_usable_cores", lambda: 16)

    slots = make_slots([(f"GPU-{n}", "NVIDIA H200") for n in range(8)], max_cpu_slots=8)
    assert {slot.environment["OMP_NUM_THREADS"] for slot in slots} == {"2"}

    monkeypatch.setattr(slots_module, "num_usable_cores", lambda: 4)
    slots = make_slots([(f"GPU-{n}", "NVIDIA H200") for n in range(8)], max_cpu_slots=8)
    assert {slot.environment["OMP_NUM_THREADS"] for slot in slots} == {"1"}

    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    (slot,) = make_slots([("GPU-1f", "NVIDIA H200")], max_cpu_slots=8)
    assert slot.environment["OMP_NUM_THREADS"] == "6"


def test_workers_share_a_gpu_only_when_there_are_more_workers_than_gpus() -> None:
    slots = make_slots([("GPU-1f", "A"), ("GPU-2e", "B")], max_cpu_slots=8, workers_per_gpu=2)

    assert [slot.index for slot in slots] == [0, 1, 2, 3]
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == [
        *("GPU-1f", "GPU-2e"),
        *("GPU-1f", "GPU-2e"),
    ]
    assert slots[0].type == "A, shared"
