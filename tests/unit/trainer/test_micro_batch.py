"""``batch.micro: auto``: a bounded search that survives out-of-memory errors and is undone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from etrain_jupyter.config.schema import BatchConfig, TrainConfig
from etrain_jupyter.rules.samples.ledger import checksum_of, epoch_order
from etrain_jupyter.trainer import warm_up
from etrain_jupyter.trainer.group.process_group import CommunicationError
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.micro_batch import (
    NUM_REFINEMENTS,
    STATE_TENSORS,
    MicroBatch,
    Reserve,
    is_out_of_memory,
    largest_fit,
    largest_pass,
)
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.capture import digest_of
from etrain_jupyter.trainer.state.train_state import TrainState, WorkPlan
from etrain_jupyter.trainer.workload import build_workload
from etrain_jupyter.wire import messages
from tests.unit.trainer.loop.test_train_loop import (
    BATCH,
    NUM_SAMPLES,
    Names,
    Net,
    alone,
    make_loop,
    run,
)

CPU = torch.device("cpu")
CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 800000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 32, 100, 4096])
def test_search_finds_nearly_the_largest_size_in_few_trials(most: int) -> None:
    for limit in [*range(1, min(most, 70) + 1), most]:
        tries: list[int] = []
        found = largest_fit(
            lambda n, limit=limit, tries=tries: not tries.append(n) and n <= limit, most
        )
        assert limit * 8 / 9 - 1 < found <= limit
        assert len(tries) <= most.bit_length() + NUM_REFINEMENTS
        assert len(set(tries)) == len(tries)


def test_search_stops_at_once_if_everything_fits_and_reports_if_nothing_does() -> None:
    assert largest_fit(lambda n: n <= 32, 32) == 32
    assert largest_fit(lambda n: False, 32) == 0


@pytest.mark.parametrize(
    ("exc", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (RuntimeError(CPU_MESSAGE), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("out of memory"), False),
        (MemoryError(), False),
        (ValueError(CPU_MESSAGE), False),
    ],
)
def test_only_memory_errors_of_torch_count_as_out_of_memory(exc, is_memory) -> None:
    assert is_out_of_memory(exc) is is_memory


@pytest.mark.parametrize(
    ("batch", "num_samples", "largest"),
    [
        ({"global": 64}, 1000, 64),
        ({"global": 64}, 40, 40),
        ({"per_worker": 24}, 1000, 24),
        ({"global": 64, "aggregation_frequency": 3}, 1000, 22),
        ({"global": 5, "aggregation_frequency": 4}, 1000, 3),  # no pass of a single sample
    ],
)
def test_largest_pass_is_that_of_a_single_rank(batch, num_samples, largest) -> None:
    assert largest_pass(BatchConfig.model_validate(batch), num_samples) == largest


@pytest.mark.parametrize(
    ("make", "num_state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3),
    ],
)
def test_memory_is_reserved_for_the_future_state_of_the_optimizer(make, num_state) -> None:
    model = nn.Linear(100, 50)
    optimizer = make(model.parameters())
    before = digest_of(model)
    reserve = Reserve(optimizer, CPU)
    size = 4 * sum(p.numel() for p in model.parameters())
    assert reserve.num_bytes == (num_state + 1) * size  # and the gradients to send
    assert digest_of(model) == before
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    # The same as after a real step.
    model(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    kept = [v for s in optimizer.state.values() for v in s.values() if v is not None and v.ndim]
    assert 4 * sum(v.numel() for v in kept) == num_state * size


def test_optimizer_that_cannot_be_measured_is_assumed_to_be_adam() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("not set up yet")

    model = nn.Linear(100, 50)
    size = 4 * sum(p.numel() for p in model.parameters())
    reserve = Reserve(Strange(model.parameters(), lr=0.1), CPU)
    assert reserve.num_bytes == (STATE_TENSORS + 1) * size


class Limited(Net):
    """A model that runs out of memory above a number of samples, with BatchNorm and dropout."""

    limit = 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)  # BatchNorm has already changed its statistics
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(f"no memory for {len(x)} samples")
        return h


AUTO = {"global": BATCH, "micro": "auto"}


def limited(limit: int) -> Callable[[], nn.Module]:
    return type("Limited", (Limited,), {"limit": limit})


def test_warm_up_finds_the_size_logs_it_and_undoes_all_trials() -> None:
    loop, sent = make_loop(names=Names(model=limited(5)), batch=AUTO)
    assert loop.micro.size == 5
    [told] = [m for m in sent if isinstance(m, messages.TextLogged)]
    assert told.level == "info"
    # 16, 8, 4 and then 6, 5.
    assert told.text.startswith("batch.micro: auto: 5 of 16 samples in one pass on cpu, after 5")
    assert "GiB free" in told.text
    untouched, _ = make_loop(names=Names(model=limited(99)))
    assert digest_of(loop.workload.model) == digest_of(untouched.workload.model)
    assert all(p.grad is None for p in loop.workload.model.parameters())
    assert not loop.workload.optimizer.state
    assert loop._effects.moving.num_values == untouched._effects.moving.num_values > 0


def test_warm_up_draws_nothing_from_the_generators() -> None:
    loop, _ = make_loop(names=Names(model=limited(5)), batch=AUTO)
    before = torch.get_rng_state()
    loop.warm_up()
    assert before.equal(torch.get_rng_state())


def test_failed_trials_keep_no_tensor_alive(monkeypatch) -> None:
    alive: list[int] = []
    free = warm_up.free_memory

    def looked() -> None:
        free()
        alive.append(sum(t() is not None for t in tensors))

    tensors: list[weakref.ref] = []

    class Big(Limited):
        limit = 2

        def forward(self, x):
            big = x.repeat(1, 1000)
            tensors.append(weakref.ref(big))
            return super().forward(x) + big.sum() * 0

    monkeypatch.setattr(warm_up, "free_memory", looked)
    make_loop(names=Names(model=Big), batch=AUTO)
    assert len(alive) >= 3
    assert set(alive) == {0}


def test_found_size_is_used_for_training_and_evaluation() -> None:
    sizes: dict[bool, set[int]] = {True: set(), False: set()}

    class Seen(Limited):
        def forward(self, x):
            out = super().forward(x)
            sizes[self.training].add(len(x))
            return out

    loop, sent = make_loop(names=Names(model=Seen), batch=AUTO, epochs=1)
    sizes[True].clear()
    assert run(loop) == "done"
    # 16 samples in 4 passes, and the last 2 of the epoch or of the set.
    assert sizes == {True: {4, 2}, False: {4, 2}}
    assert [m.record["samples"] for m in sent if isinstance(m, messages.EvalFinished)] == [
        NUM_SAMPLES
    ]


def test_aggregation_frequency_still_makes_at_least_as_many_passes() -> None:
    batch = {**AUTO, "aggregation_frequency": 8}
    loop, _ = make_loop(names=Names(model=limited(5)), batch=batch, steps=1)
    assert loop.micro.size == loop.micro.most == 2
    batch = {**AUTO, "aggregation_frequency": 2}
    loop, _ = make_loop(names=Names(model=limited(5)), batch=batch, steps=1)
    assert (loop.micro.size, loop.micro.most) == (5, 8)


def test_model_that_does_not_fit_with_one_sample_is_refused_with_the_figures() -> None:
    def loss(output, target):
        raise torch.OutOfMemoryError("no memory for anything")

    names = Names(model=lambda: nn.Linear(4, 3), loss=loss)
    with pytest.raises(WorkloadError, match=r"not even one sample fits .*GiB free\)\. Use a small"):
        make_loop(names=names, batch=AUTO)


def test_other_errors_end_the_search() -> None:
    class Wrong(Net):
        def forward(self, x):
            if len(x) == 16:
                raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        make_loop(names=Names(model=Wrong), batch=AUTO)


def test_out_of_memory_in_a_step_halves_the_size_and_ends_the_generation() -> None:
    loop, sent = make_loop(names=Names(model=limited(99)), batch=AUTO, steps=3)
    assert loop.micro.size == BATCH
    before = digest_of(loop.workload.model)
    loop.workload.model.limit = 5
    for size in (8, 4):
        group = alone()
        with pytest.raises(CommunicationError, match="out of memory"):
            loop.run(group, loop.wrap(group))
        assert group.failure == "out of memory"
        assert (loop.micro.size, loop.progress) == (size, (0, 0))
        assert digest_of(loop.workload.model) == before
        assert all(p.grad is None for p in loop.workload.model.parameters())
    told = [m.text for m in sent if isinstance(m, messages.TextLogged) and m.level == "warning"]
    assert told[-1] == (
        "rank 0 ran out of memory in step 1: its micro-batches are reduced to 4; a new generation "
        "continues from step 0, and nothing is lost"
    )
    loop.steps.in_step = False
    assert run(loop) == "done"
    records = [m for m in sent if isinstance(m, dict)]
    order = epoch_order(seed=0, epoch=0, num_samples=NUM_SAMPLES)
    due = [checksum_of(order[first : first + BATCH]) for first in (0, 16, 32)]
    assert [r["sample_checksum"] for r in records] == due


def test_size_of_one_cannot_shrink_and_neither_can_a_fixed_size() -> None:
    exc = torch.OutOfMemoryError("no memory")
    one = MicroBatch(BatchConfig.model_validate({"micro": "auto"}), most=1)
    assert not one.shrink(exc)
    fixed = MicroBatch(BatchConfig.model_validate({"micro": 8}), most=32)
    assert not fixed.shrink(exc)
    auto = MicroBatch(BatchConfig.model_validate({"micro": "auto"}), most=3)
    assert not auto.shrink(ValueError("no memory"))
    assert auto.shrink(exc)
    assert auto.size == 1


def test_rebuilt_workload_does_not_retry_a_size_that_was_reduced() -> None:
    batch = BatchConfig.model_validate({"micro": "auto"})
    earlier, later = MicroBatch(batch, most=32), MicroBatch(batch, most=32)
    earlier.shrink(torch.OutOfMemoryError("no memory"))
    later.limit_to(earlier)
    tries: list[int] = []
    later.find(lambda size: not tries.append(size), lambda: "")
    assert (tries, later.size) == ([16], 16)


REAL = """
    import resource
    import torch
    from torch import nn
    from tests.unit.trainer.loop.test_train_loop import Names, make_loop, run

    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x) + 0 * x.repeat(1, 1_000_000).exp().mean()  # 2 x 16 MB a sample

    make_loop(names=Names(model=nn.Linear(4, 3)), steps=1)  # whatever is loaded late
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    batch = {"global": 16, "micro": "auto"}
    loop, sent = make_loop(names=Names(model=Hungry), batch=batch, steps=2)
    assert run(loop) == "done"
    print(loop.micro.size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="platform: limits address space, as Linux does")
def test_real_out_of_memory_on_a_cpu_is_survived() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL)],
        # glibc reserves 64 MB of addresses for each thread, such as that of the digests.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= 8  # 16 samples take 512 MB and more


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_out_of_memory_on_a_gpu_is_survived_and_leaves_nothing_behind() -> None:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = x.repeat(1, share).exp()  # and its gradient: so much of the memory a sample
            return self.layer(x) + 0 * big.mean(dim=1, keepdim=True)

    device = torch.device("cuda", 0)
    share = torch.cuda.mem_get_info(device)[1] // (4 * 4 * 16)  # 1/16 of the memory
    keys = {
        "model": "Net",
        "data": {"train": "d"},
        "loss": "f",
        "optimizer": "AdamW",
        "batch": {"global": 32, "micro": "auto"},
    }
    config = TrainConfig.model_validate(keys)
    workload = build_workload(config, Names(model=Hungry), device)
    state = TrainState(workload, config, WorkPlan.of(config, workload))
    loop = TrainLoop(state, lambda _: None)
    before = torch.cuda.memory_allocated(device)
    loop.warm_up()
    assert loop.micro.size is not None
    assert 1 <= loop.micro.size < 16
    # cuBLAS keeps a workspace; the smallest trial took gigabytes.
    assert torch.cuda.memory_allocated(device) - before < 256 << 20
    assert run(loop) == "done"
