"""Workload of ``uneven`` whose ranks sleep for each sample: their speeds use no CPU time.

So the speeds are exact on a machine with few cores, and other load hardly matters.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SPEEDS_FILE = "ETRAIN_BENCH_SPEEDS"
"""Variable with the path of a JSON file: relative speed by process id."""
BATCH = 256
SAMPLE_S = 0.002
"""Seconds per sample at speed 1."""
NUM_SAMPLES = 8192


def make_points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of shape ``(B, 8)`` and labels for the side of a plane, ``(B,)``."""
    points_BF = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    return points_BF, (points_BF.sum(1) > 0).long()


def build_model() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def sleeping_loss(outputs_BC: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """Sleep according to the speed of this process, then return the cross-entropy loss."""
    time.sleep(SAMPLE_S * len(labels_B) / speed_of(os.getpid()))
    return F.cross_entropy(outputs_BC, labels_B)


def speed_of(pid: int) -> float:
    """Return the relative speed of a process; 1.0 if none is set."""
    path = os.environ.get(SPEEDS_FILE, "")
    speeds: dict[str, float] = json.loads(Path(path).read_text()) if path else {}
    return speeds.get(str(pid), 1.0)


def set_speed(pid: int, speed: float) -> None:
    """Set the relative speed of a process, from its next pass on."""
    path = Path(os.environ[SPEEDS_FILE])
    speeds = json.loads(path.read_text()) | {str(pid): speed}
    # The ranks read the file at any time.
    new = path.with_suffix(".new")
    new.write_text(json.dumps(speeds))
    new.replace(path)
