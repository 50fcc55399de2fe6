"""Memory and step time of a state that is divided among the ranks.

``shard: optimizer`` next to ``shard: none``, both in the product's training loop, and torch's
``ZeroRedundancyOptimizer`` next to DDP, both in a plain loop. They take turns, in blocks of steps,
in the same rank processes, so that changes of the machine's load affect all of them. Rank 0 times
its steps; the first ones of each block do not count.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

from benchmarks.common import report

WORLD_SIZES = (2, 3, 4)
HOST = "127.0.0.1"
BAR = 1.05
"""Maximum step time, in multiples of ``shard: none``, that passes."""
PAIRS = {"optimizer": "none", "ZeRO": "DDP"}
NAMES = ("none", "optimizer", "DDP", "ZeRO")
NUM_SKIPPED = 3
"""Steps at the beginning of a block that do not count: DDP rebuilds its buckets in the second."""
BATCH = 8
"""Samples per step and rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--blocks", type=int, help="blocks per variant (default 8)")
    parser.add_argument("--steps", type=int, default=9, help="steps in a block (default 9)")
    parser.add_argument("--millions", type=float, default=10.0, help="parameters (default 10)")
    parser.add_argument("--world-size", type=int, action="append", help="default: 2, 3, 4")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each world size."""
    blocks = options.blocks or (2 if options.quick else 8)
    sizes = {
        str(size): measure_size(size, blocks, options.steps, options.millions)
        for size in options.world_size or list(WORLD_SIZES)
    }
    return {
        "benchmark": "zero",
        "blocks": blocks,
        "steps": options.steps,
        "millions": options.millions,
        "bar": BAR,
        "sizes": sizes,
    }


def measure_size(world_size: int, blocks: int, steps: int, millions: float) -> dict[str, Any]:
    """Return the figures of all variants at one world size."""
    import torch.distributed

    dist: Any = torch.distributed
    store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(
            target=serve, args=(rank, world_size, store.port, blocks, steps, millions, results)
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    figures: dict[str, Any] = {}
    [of_rank_0] = [one for one in found if one["rank"] == 0]
    for name in NAMES:
        figures[name] = {
            "step_s": statistics.median(of_rank_0["times"][name]),
            "state_bytes": [one["state_bytes"][name] for one in sorted(found, key=_rank_of)],
            "memory_bytes": [one["memory_bytes"][name] for one in sorted(found, key=_rank_of)],
            "is_same": all(one["digests"][name] == found[0]["digests"]["none"] for one in found),
        }
    for name, base in PAIRS.items():
        figures[name]["ratio"] = figures[name]["step_s"] / figures[base]["step_s"]
        # By block, so that the load of the machine is the same for both.
        pairs = zip(of_rank_0["blocks"][name], of_rank_0["blocks"][base], strict=True)
        figures[name]["ratios"] = [one / other for one, other in pairs]
    print(f"zero, {world_size} ranks: ratio {figures['optimizer']['ratio']:.3f}", flush=True)
    return figures


def _rank_of(result: dict[str, Any]) -> int:
    return int(result["rank"])


def serve(
    rank: int,
    world_size: int,
    port: int,
    blocks: int,
    steps: int,
    millions: float,
    results: Any,
) -> None:
    """Run one rank: all variants in turns."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed

    class Rendezvous(dist.PrefixStore):  # type: ignore[misc]
        def abort(self) -> None:
            """Do nothing: no thread waits in it after the group has formed."""

    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, None, False, wait_for_workers=False)
    width = int((millions * 1e6 / 4) ** 0.5)
    variants: dict[str, Any] = {
        "none": Ours("none", rank, world_size, width),
        "optimizer": Ours("optimizer", rank, world_size, width),
        "DDP": Plain(rank, world_size, width, is_zero=False),
        "ZeRO": Plain(rank, world_size, width, is_zero=True),
    }
    blocks_s: dict[str, list[float]] = {name: [] for name in variants}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(blocks):
        # In turns, and every other time in reverse.
        for name in list(variants)[:: -1 if number % 2 else 1]:
            found = variants[name].run(Rendezvous(f"{number}-{name}", store), steps)
            times[name] += found[NUM_SKIPPED:]
            blocks_s[name].append(statistics.median(found[NUM_SKIPPED:]))
    results.put(
        {
            "rank": rank,
            "times": times,
            "blocks": blocks_s,
            "state_bytes": {name: one.num_state_bytes() for name, one in variants.items()},
            "memory_bytes": {name: one.memory_bytes for name, one in variants.items()},
            "digests": {name: one.digest() for name, one in variants.items()},
        }
    )
    store.add("done", 1)
    while int(store.add("done", 0)) < world_size:
        time.sleep(0.05)
    os._exit(0)  # like a trainer: gloo's threads may still be shutting down


def make_model(width: int) -> Any:
    """Return the model: four square layers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())))


def squares(output: Any, target: Any) -> Any:
    """Return the loss of each sample."""
    return output.square().mean(1)


class Ours:
    """The product's training loop."""

    def __init__(self, shard: str, rank: int, world_size: int, width: int) -> None:
        import torch

        from etrain_jupyter.config.schema import TrainConfig
        from etrain_jupyter.trainer.loop.train_loop import TrainLoop
        from etrain_jupyter.trainer.state.train_state import TrainState, WorkPlan
        from etrain_jupyter.trainer.workload import build_workload

        self._rank, self._world_size = rank, world_size
        self._generation = 0
        config = TrainConfig.model_validate(
            {
                "model": "m",
                "data": {"train": "d"},
                "loss": "f",
                "optimizer": {"name": "AdamW", "lr": 1e-3},
                "batch": {"global": BATCH * world_size},
                "shard": shard,
                "steps": 100_000,
            }
        )
        rows = torch.randn(BATCH * world_size, width, generator=torch.Generator().manual_seed(1))
        names = {
            "model": lambda: make_model(width),
            "data.train": (rows, torch.zeros(len(rows))),
            "loss": squares,
        }
        self._workload = build_workload(config, cast(Any, _Names(names)), torch.device("cpu"))
        state = TrainState(self._workload, config, WorkPlan.of(config, self._workload))
        self._loop = TrainLoop(state, lambda report: None)
        self._loop.warm_up()
        self.memory_bytes = 0
        """Weights, gradients and optimizer state as an update begins."""
        update = self._workload.optimizer.step

        def measured(closure: Any = None) -> Any:
            self.memory_bytes = max(self.memory_bytes, self._memory_bytes())
            return update(closure)

        self._workload.optimizer.step = measured  # type: ignore[method-assign]

    def run(self, store: Any, steps: int) -> list[float]:
        """Make ``steps`` steps in a generation of their own; return their durations in seconds."""
        from etrain_jupyter.trainer.boundary import BoundaryHooks
        from etrain_jupyter.trainer.group.process_group import RankGroup

        self._generation += 1
        group = RankGroup(
            generation=self._generation,
            rank=self._rank,
            world_size=self._world_size,
            store=store,
            host=HOST,
        )
        group.form()
        self._divide(group)
        loop, ends = self._loop, [time.perf_counter()]

        class Hooks(BoundaryHooks):
            def after_step(self, boundary: Any) -> None:
                ends.append(time.perf_counter())
                if len(ends) == steps:
                    loop.change_pending.set()

        loop.change_pending.clear()
        loop.run(group, loop.wrap(group), Hooks())
        shards = self._workload.shards
        if shards is not None:
            shards.leave()
        group.close()
        return [after - before for before, after in itertools.pairwise(ends)]

    def _divide(self, group: Any) -> None:
        from etrain_jupyter.trainer.sharding.shard_sync import NO_STEP, RankReport, ShardSync

        shards = self._workload.shards
        if shards is None:
            return
        sync = ShardSync(group, shards, lambda: None)
        step = self._loop.step or NO_STEP
        plan = sync.agree(RankReport(step=step, spans=tuple(shards.spans)), is_restored=False)
        sync.divide(plan)
        shards.connect(group)

    def num_state_bytes(self) -> int:
        """Return the memory of the optimizer's state on this rank."""
        shards = self._workload.shards
        return _num_bytes(self._workload.optimizer) if shards is None else shards.num_bytes

    def _memory_bytes(self) -> int:
        parameters = [*self._workload.model.parameters()]
        gradients = [p.grad.nbytes for p in parameters if p.grad is not None]
        return sum(p.nbytes for p in parameters) + sum(gradients) + self.num_state_bytes()

    def digest(self) -> str:
        """Return the digest of the weights."""
        return _digest_of(self._workload.model)


class Plain:
    """A plain loop with DDP and torch's optimizer, or its ``ZeroRedundancyOptimizer``."""

    def __init__(self, rank: int, world_size: int, width: int, *, is_zero: bool) -> None:
        import torch

        self._rank, self._world_size, self._is_zero = rank, world_size, is_zero
        self._model = make_model(width)
        rows = torch.randn(BATCH * world_size, width, generator=torch.Generator().manual_seed(1))
        self._rows = rows[rank * BATCH : (rank + 1) * BATCH]
        self._optimizer: Any = None
        self._state: Any = None
        self.memory_bytes = 0
        """Weights, gradients and optimizer state after an update."""

    def run(self, store: Any, steps: int) -> list[float]:
        """Make ``steps`` steps; return their durations in seconds."""
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._world_size)
        model = DistributedDataParallel(self._model)
        make: Callable[[], Any] = lambda: torch.optim.AdamW(  # noqa: E731
            self._model.parameters(), lr=1e-3, fused=True
        )
        if self._is_zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            # It belongs to a process group; its state is the same in every block.
            optimizer = ZeroRedundancyOptimizer(
                self._model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True
            )
        else:
            optimizer = self._optimizer or make()
        self._optimizer = optimizer
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            model.zero_grad()
            squares(model(self._rows), None).mean().backward()
            optimizer.step()
            tensors = [t for p in self._model.parameters() for t in (p, p.grad) if t is not None]
            self.memory_bytes = sum(t.nbytes for t in tensors) + self.num_state_bytes()
            times.append(time.perf_counter() - started)
        dist.barrier()
        dist.destroy_process_group()
        return times

    def num_state_bytes(self) -> int:
        """Return the memory of the optimizer's state on this rank."""
        return _num_bytes(getattr(self._optimizer, "optim", self._optimizer))

    def digest(self) -> str:
        """Return the digest of the weights."""
        return _digest_of(self._model)


class _Names:
    """The notebook's objects."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def evaluate(self, key: str) -> Any:
        return self._names[key]


def _num_bytes(optimizer: Any) -> int:
    import torch

    states = optimizer.state.values()
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor))


def _digest_of(model: Any) -> str:
    from etrain_jupyter.trainer.state.capture import digest_of

    return digest_of(model)


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    rows = []
    for size, figures in result["sizes"].items():
        for name in NAMES:
            one = figures[name]
            ratio = one.get("ratio")
            bounds = ""
            if ratio is not None:
                bounds = f"{ratio:.2f} [{min(one['ratios']):.2f} .. {max(one['ratios']):.2f}]"
            rows.append(
                [
                    size,
                    name if name in ("DDP", "ZeRO") else f"shard: {name}",
                    f"{one['step_s'] * 1e3:.0f}",
                    bounds,
                    f"{max(one['state_bytes']) / 1e6:.1f}",
                    f"{max(one['memory_bytes']) / 1e6:.1f}",
                ]
            )
    heads = ["ranks", "", "step, ms", "of its base", "state, MB", "with weights, gradients"]
    return report.table(heads, rows)
