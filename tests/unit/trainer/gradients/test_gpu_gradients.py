"""Gradients of ranks with GPUs, with fakes for the device and NCCL."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from etrain_jupyter.trainer.devices import choose_device, facts_of
from etrain_jupyter.trainer.group import transports
from etrain_jupyter.trainer.group.backends import NCCL
from etrain_jupyter.trainer.group.cuda_buckets import sum_through_host
from etrain_jupyter.trainer.group.process_group import CommunicationError
from tests.unit.trainer.peers import connected


class Bucket:
    """A bucket as DDP passes it to its hook."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def buffer(self) -> torch.Tensor:
        return self.tensor


class FakeNccl:
    """Sums as if the other rank had the same values; futures complete at once, like NCCL's."""

    def __init__(self) -> None:
        self.aborted, self.shut = threading.Event(), threading.Event()
        self.ended_by: list[threading.Thread] = []
        self.device_done = threading.Event()
        self.device_done.set()
        self.error = ""

    def connect(self, store: Any, rank: int, world_size: int, keep: Any) -> None:
        keep(self)

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeNccl:
        if self.error:
            raise RuntimeError(self.error)
        tensors[0].mul_(2)
        self.value = tensors
        return self

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.value)
        return future

    def abort(self) -> None:
        self.ended_by.append(threading.current_thread())
        self.device_done.set()  # an abort ends the kernels
        self.aborted.set()

    def shutdown(self) -> None:
        self.ended_by.append(threading.current_thread())
        self.shut.set()


@pytest.fixture
def nccl(monkeypatch) -> FakeNccl:
    fake = FakeNccl()
    monkeypatch.setattr(transports, "moment_of_device", lambda: fake.device_done.wait)
    return fake


def by_nccl(fake: FakeNccl):
    return connected(backend=NCCL, connect_nccl=fake.connect)


def test_nccl_sums_a_bucket_and_the_update_waits_for_the_device(nccl):
    with by_nccl(nccl) as (group, _):
        nccl.device_done.clear()
        buffer = torch.ones(4)
        assert group.ddp_hook(Bucket(buffer)).wait().tolist() == [2] * 4
        settled = threading.Thread(target=group.settle)
        settled.start()
        settled.join(0.1)
        assert settled.is_alive()
        nccl.device_done.set()
        settled.join(10)
        assert not settled.is_alive()


def test_rank_without_samples_adds_nothing(nccl):
    with by_nccl(nccl) as (group, _):
        group.contributes = False
        assert group.ddp_hook(Bucket(torch.ones(2))).wait().tolist() == [0, 0]


def test_closed_group_shuts_nccl_down_in_a_thread(nccl):
    with by_nccl(nccl):
        pass
    assert nccl.shut.wait(10)
    assert not nccl.aborted.is_set()
    assert nccl.ended_by[0] is not threading.main_thread()


def test_abort_frees_the_wait_for_a_stuck_device(nccl):
    with by_nccl(nccl) as (group, _):
        nccl.device_done.clear()
        group.ddp_hook(Bucket(torch.ones(2))).wait()
        threading.Timer(0.1, group.abort, ["a peer is lost"]).start()
        with pytest.raises(CommunicationError, match="a peer is lost"):
            group.settle()
    assert nccl.aborted.wait(10)
    assert not nccl.shut.is_set()
    assert nccl.ended_by[0] is not threading.main_thread()


def test_abort_does_not_wait_for_an_nccl_that_never_returns(nccl, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(nccl, "abort", never.wait)
    with by_nccl(nccl) as (group, _):
        nccl.device_done.clear()
        threading.Timer(0.1, group.abort, ["a peer is lost"]).start()
        with pytest.raises(CommunicationError, match="a peer is lost"):
            group.settle()
    never.set()
    nccl.device_done.set()


def test_sum_that_cannot_be_started_is_found_before_the_update(nccl):
    with by_nccl(nccl) as (group, _):
        nccl.error = "NCCL communicator was aborted"
        buffer = torch.ones(2)
        assert group.ddp_hook(Bucket(buffer)).wait() is buffer  # the backward pass continues
        with pytest.raises(CommunicationError, match="communicator was aborted"):
            group.settle()


# Review G2: the report had only "a collective failed" instead of NCCL's message.


def test_error_of_nccl_while_it_connects_is_kept_in_full(nccl):
    text = "NCCL error in: a.cpp:7\nncclSystemError: failed.\nLast error:\nno space on /dev/shm"

    def refuse(store: Any, rank: int, world_size: int, keep: Any) -> None:
        raise RuntimeError(f"{text}\nException raised from create at b.cpp:9 (most recent call)")

    groups: list[Any] = []
    with pytest.raises(CommunicationError, match="dev/shm"):  # noqa: SIM117
        with connected(backend=NCCL, connect_nccl=refuse, on_made=groups.append):
            pass
    assert (groups[0].failure, groups[0].failed_backend) == (text, "nccl")


def test_error_of_nccl_in_a_sum_is_kept_in_full(nccl):
    with by_nccl(nccl) as (group, _):
        nccl.error = "ncclRemoteError: a call failed.\nLast error:\npeer closed the connection"
        group.ddp_hook(Bucket(torch.ones(2))).wait()
        assert (group.failure, group.failed_backend) == (nccl.error, "nccl")


def test_nccl_that_connects_after_the_abort_is_not_used(nccl):
    def connect_late(store: Any, rank: int, world_size: int, keep: Any) -> None:
        groups[0].abort("too late")
        keep(nccl)

    groups: list[Any] = []
    with pytest.raises(CommunicationError, match="too late"):  # noqa: SIM117
        with connected(backend=NCCL, connect_nccl=connect_late, on_made=groups.append):
            pass
    assert groups[0]._transport.backend is None


def test_bucket_of_a_shared_gpu_is_summed_in_host_memory():
    buffer = torch.tensor([1.0, 2.0])
    copies, completed = [], []

    def sum_on_host(host: torch.Tensor) -> None:
        copies.append(host)
        host.add_(10)

    work = sum_through_host(
        buffer, sum_on_host=sum_on_host, complete=lambda: completed.append(buffer.tolist())
    )
    assert completed == []
    work()
    assert copies[0].data_ptr() != buffer.data_ptr()
    assert completed == [[11, 12]]


def test_worker_without_a_gpu_trains_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = facts_of(choose_device())
    assert (facts.name, facts.gpu, facts.memory_bytes) == ("cpu", "", 0)


def test_worker_with_a_gpu_takes_the_one_that_it_sees(monkeypatch):
    taken = []

    class Properties:
        uuid = "1234"
        total_memory = 80 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    device = choose_device()
    assert taken == [torch.device("cuda", 0)] == [device]
    facts = facts_of(device)
    assert (facts.name, facts.gpu, facts.memory_bytes) == ("cuda:0", "GPU-1234", 80 << 30)
    # torch's watchdog must not end the process when a peer is lost.
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    # Review G3: the watchdog ended the process before it could report a CUDA error.
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "1"
    # With NVLink SHARP, an aborted communicator does not free everything.
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
