"""Jobs that are slow for a known cause, for etrain-jupyter and for a plain torch script.

Waiting replaces work that would otherwise need a disk, a device or a core of its own: on a machine
with few cores, a remedy that uses more of them would otherwise show no gain. For the same reason, a
step without its cause takes at least 20 ms in most jobs: in steps of 4 ms, the time until a process
gets a core would decide.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MARKER = "DIAGNOSED_MARKER"
"""Variable with the path of a file; the process that creates it is the slow one."""
MODULE = "benchmarks.advice.diagnosed_jobs"


class Features(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """64 random features per sample; fetching a sample waits for a disk."""

    wait_s = 0.0

    def __init__(self, size: int = 8192) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 64, generator=generator)
        self.y = (self.x.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.x[index], self.y[index]


class SlowFeatures(Features):
    """Fetching a sample takes 4 ms."""

    wait_s = 0.004


class FewFeatures(Features):
    """A set to evaluate on."""

    def __init__(self) -> None:
        super().__init__(1024)


class SlowOnOneWorker(Features):
    """Fetching a sample takes 6 ms on one worker only."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if is_slow_process():
            time.sleep(0.006)
        return super().__getitem__(index)


def small() -> nn.Module:
    """Return a small MLP."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))


def deep() -> nn.Module:
    """Return 40 small layers, whose time is that of starting them."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 2))


def large() -> nn.Module:
    """Return an MLP of 2.4 million parameters."""
    return nn.Sequential(
        nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 2)
    )


class SlowSGD(torch.optim.SGD):
    """SGD whose update waits for 40 ms, as for a device with slow memory.

    A dense optimizer of many parameters would not do: with torch's fused kernel, the exchange of
    their gradients between two processes takes several times as long as their update.
    """

    def step(self, closure: Any = None) -> Any:
        """Update the weights."""
        time.sleep(0.04)
        return super().step(closure)


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that waits in each update."""
    return SlowSGD(parameters, lr=0.01)


class SlowState(nn.Module):
    """A small MLP with a state that takes 40 ms to read, as from another device.

    A large state would not do: a checkpoint blocks training only for a copy in memory, which takes
    less time than the exchange of as many gradients, and the next one waits for its write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(B, 2)``."""
        logits: torch.Tensor = self.layers(x)
        return logits

    def get_extra_state(self) -> int:
        """Return a constant, after 40 ms."""
        time.sleep(0.04)
        return 0

    def set_extra_state(self, state: int) -> None:
        """Accept the constant."""


def is_slow_process() -> bool:
    """Return True in the first process that calls this function."""
    global _is_slow
    if _is_slow is None:
        try:
            os.close(os.open(os.environ[MARKER], os.O_CREAT | os.O_EXCL))
            _is_slow = True
        except FileExistsError:
            _is_slow = False
    return _is_slow


_is_slow: bool | None = None


def on_a_fast_device(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Wait as for a device that needs 20 ms for any number of samples."""
    if output.requires_grad:
        time.sleep(0.02)
    return F.cross_entropy(output, target)


def slow_on_one_worker(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Wait as for a device that needs 20 ms, and on one worker 6 ms more per sample."""
    if output.requires_grad and is_slow_process():
        time.sleep(0.006 * len(target))
    return on_a_fast_device(output, target)


def on_a_device(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Wait as for a device that needs 1 ms per sample."""
    time.sleep(0.001 * len(target))
    return F.cross_entropy(output, target)


def on_a_slow_device(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Wait as for a device that needs 5 ms per sample."""
    time.sleep(0.005 * len(target))
    return F.cross_entropy(output, target)


def in_a_device(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Wait as for a device that needs 5 ms, and 0.2 ms per sample."""
    time.sleep(0.005 + 0.0002 * len(target))
    return F.cross_entropy(output, target)


def slow_metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the accuracy, after a computation that takes 40 ms."""
    time.sleep(0.04)
    return (output.argmax(dim=1) == target).float()


@dataclass(frozen=True, kw_only=True)
class SlowJob:
    """A job, its cause, and the verdicts of TraceML that name it."""

    cause: str
    keys: dict[str, Any]
    """Keys of the cell that differ from ``BODY``."""
    peer: tuple[str, ...]
    """Words of TraceML's verdict that count as right."""
    workers: int = 2
    rate: str = ""
    """Rate of the link, in the units of ``tc``; empty for no limit."""


CROSS_ENTROPY = "torch.nn.functional:cross_entropy"

BODY: dict[str, Any] = {
    "model": f"{MODULE}:small",
    "data": {"train": f"{MODULE}:Features"},
    "loss": f"{MODULE}:on_a_fast_device",
    "optimizer": {"name": "SGD", "lr": 0.01},
    "batch": {"global": 32},
    "checkpoint": {"every": "1000000 steps"},
}
RESIDUAL = ("RESIDUAL",)

JOBS: dict[str, SlowJob] = {
    "slow data set": SlowJob(
        cause="input", peer=("INPUT",), keys={"data": {"train": f"{MODULE}:SlowFeatures"}}
    ),
    "one loader": SlowJob(
        cause="input",
        peer=("INPUT",),
        keys={"data": {"train": f"{MODULE}:SlowFeatures", "num_workers": 1}},
    ),
    "slow worker": SlowJob(
        cause="straggler",
        peer=("STRAGGLER",),
        workers=3,
        keys={"loss": f"{MODULE}:slow_on_one_worker"},
    ),
    "slow disk of one worker": SlowJob(
        cause="straggler",
        peer=("STRAGGLER",),
        workers=3,
        keys={"data": {"train": f"{MODULE}:SlowOnOneWorker"}},
    ),
    "slow link": SlowJob(
        cause="communication",
        peer=("COMM", "NETWORK"),
        rate="500mbit",
        keys={"model": f"{MODULE}:large", "loss": CROSS_ENTROPY},
    ),
    "slower link": SlowJob(
        cause="communication",
        peer=("COMM", "NETWORK"),
        rate="200mbit",
        keys={"model": f"{MODULE}:large", "loss": f"{MODULE}:on_a_device"},
    ),
    "tiny batches": SlowJob(
        cause="overhead",
        peer=RESIDUAL,
        keys={"model": f"{MODULE}:deep", "loss": CROSS_ENTROPY, "batch": {"global": 4}},
    ),
    "heavy metric": SlowJob(
        cause="metrics", peer=RESIDUAL, keys={"metrics": {"slow": f"{MODULE}:slow_metric"}}
    ),
    "slow optimizer": SlowJob(
        cause="optimizer", peer=("OPTIMIZER",), keys={"optimizer": f"{MODULE}:slow_sgd"}
    ),
    "checkpoint every step": SlowJob(
        cause="checkpoint",
        peer=("CHECKPOINT", *RESIDUAL),
        keys={"model": f"{MODULE}:SlowState", "checkpoint": {"every": "1 steps"}},
    ),
    "heavy evaluation": SlowJob(
        cause="evaluation",
        peer=("EVAL", *RESIDUAL),
        keys={
            "data": {"train": f"{MODULE}:Features", "eval": f"{MODULE}:FewFeatures"},
            "loss": f"{MODULE}:in_a_device",
            "eval": "10 steps",
        },
    ),
    "computation": SlowJob(
        cause="compute", peer=("COMPUTE",), keys={"loss": f"{MODULE}:on_a_slow_device"}
    ),
}


def build(name: str) -> Callable[..., Any]:
    """Return an object of this module by its reference."""
    found: Callable[..., Any] = globals()[name.partition(":")[2]]
    return found
