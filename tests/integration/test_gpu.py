"""The engine on GPUs; most of these tests need one or two CUDA devices."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from etrain_jupyter.trainer.data import Share, open_samples
from etrain_jupyter.trainer.devices import choose_device, facts_of
from etrain_jupyter.trainer.group.backends import GLOO, NCCL, connect_nccl, end_nccl
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore
from etrain_jupyter.trainer.prefetch import to_device
from etrain_jupyter.trainer.state.capture import digest_of, put_state, take_state
from etrain_jupyter.trainer.state.transfer import Transferred, receive_state, send_state
from etrain_jupyter.trainer.state.transfer_plan import CHUNK_BYTES
from tests.capabilities import long
from tests.integration import gpu_ranks
from tests.unit.trainer.peers import linked_groups, on_each

pytestmark = pytest.mark.timeout(300)


def needs_gpus(count: int) -> Callable[[Any], Any]:
    """Return a mark that skips a test if there are fewer CUDA devices."""

    def mark(test: Any) -> Any:
        is_short = torch.cuda.device_count() < count
        reason = f"needs {count} CUDA devices, there are {torch.cuda.device_count()}"
        return pytest.mark.gpu(pytest.mark.skipif(is_short, reason=reason)(test))

    return mark


def on_ranks(
    work: Callable[..., None],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    device: str = "cuda",
    share: bool = True,
) -> list[Any]:
    """Run ``work`` on two ranks, sharing the first GPU or with one each; return their results."""
    store = dist.TCPStore(gpu_ranks.HOST, 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = []
    for rank in range(2):
        if device == "cuda":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if share else str(rank))
        args = (answers, rank, 2, store.port, backend, device)
        processes.append(context.Process(target=work, args=args))
        processes[-1].start()
    try:
        return sorted(answers.get(timeout=200) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()


@long
def test_gpu_scenarios_work_on_the_cpu(monkeypatch):
    first, second = on_ranks(gpu_ranks.train, GLOO, monkeypatch, device="cpu")
    assert first[1] == second[1]
    assert max(first[2], second[2]) < 1e-5
    first, second = on_ranks(gpu_ranks.abort, GLOO, monkeypatch, device="cpu")
    assert first[1] == second[1]
    assert first[3] == "rank 1 is silent"


@needs_gpus(1)
def test_two_ranks_sharing_a_gpu_train_with_gloo(monkeypatch):
    first, second = on_ranks(gpu_ranks.train, GLOO, monkeypatch)
    assert first[1] == second[1]
    assert max(first[2], second[2]) < 1e-4


@needs_gpus(1)
def test_aborted_rank_on_a_shared_gpu_trains_in_the_next_generation(monkeypatch):
    first, second = on_ranks(gpu_ranks.abort, GLOO, monkeypatch)
    assert first[1] == second[1]
    assert first[3] == "rank 1 is silent"


@needs_gpus(1)
@pytest.mark.parametrize("gently", [True, False])
def test_nccl_of_a_single_rank_connects_and_shuts_down(gently):
    kept: list[Any] = []
    facts = facts_of(choose_device())
    assert facts.gpu.startswith("GPU-")
    connect_nccl(BroadcastStore(lambda key, value: None), 0, 1, kept.append)
    (backend,) = kept
    values = torch.arange(4.0, device="cuda")
    backend.allreduce([values]).wait()
    assert values.tolist() == [0, 1, 2, 3]
    end_nccl(backend, gently=gently)
    (thread,) = [t for t in threading.enumerate() if t.name == "etrain-nccl-end"]
    thread.join(60)
    assert not thread.is_alive()
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]  # the device is still usable


@needs_gpus(2)
def test_two_ranks_with_one_gpu_each_train_with_nccl(monkeypatch):
    first, second = on_ranks(gpu_ranks.train, NCCL, monkeypatch, share=False)
    assert first[1] == second[1]
    assert max(first[2], second[2]) < 1e-4


@needs_gpus(2)
def test_aborted_nccl_rank_trains_in_the_next_generation(monkeypatch):
    first, second = on_ranks(gpu_ranks.abort, NCCL, monkeypatch, share=False)
    assert first[1] == second[1]
    assert first[3] == "rank 1 is silent"


@needs_gpus(1)
@pytest.mark.parametrize("keep", [True, False])
def test_lagging_survivor_receives_the_state_without_a_second_copy_on_its_gpu(keep):
    def stepped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    sender, receiver = stepped(1), stepped(2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def part(group: RankGroup) -> Transferred:
        if group.rank == 0:
            return send_state(group, *take_state(*sender), [1])
        header, tensors, moved = receive_state(
            group, receiver[0], [1], optimizer=receiver[1], keep=keep
        )
        put_state(*receiver, header, tensors)
        return moved

    with linked_groups(2) as groups:
        _, moved = on_each(groups, part)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"state {moved.num_bytes / 1e6:.0f} MB, newly allocated at most {peak / 1e6:.1f} MB")
    assert moved.num_bytes > 400e6
    assert peak <= 2 * CHUNK_BYTES
    assert digest_of(receiver[0]) == digest_of(sender[0])
    mine, its = (list(optimizer.state.values()) for _, optimizer in (receiver, sender))
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(mine, its, strict=True))


@needs_gpus(1)
def test_batches_are_prepared_in_pinned_memory() -> None:
    rows, device = torch.randn(600, 1024), torch.device("cuda:0")
    source = open_samples(
        (rows, rows), name="data.train", collate=None, num_workers=0, pins_memory=True
    )
    try:
        [(_, batch)] = source.batches([Share(range(500, 0, -1))])
    finally:
        source.close()

    moved = to_device(batch, device)

    assert all(tensor.is_pinned() for tensor in batch)
    assert torch.equal(moved[0].cpu(), rows[range(500, 0, -1)])
