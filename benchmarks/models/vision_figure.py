"""Draw the runs of ``vision``: losses of all policies in one picture per task."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LABELS = {
    "fixed": "one worker",
    "global": "fixed global batch",
    "immediate": "fixed batch per worker, rate at once",
    "ramp": "... with the ramp",
    "adascale": "... with AdaScale",
}
NUM_PARTS = 60
"""Points of a curve, each the mean loss over an equal part of the samples."""


def draw(runs: Sequence[dict[str, Any]], tasks: Sequence[str], seed: int, path: Path) -> None:
    """Draw the runs with one seed.

    Args:
        runs: Runs of ``vision``.
        tasks: Names of the tasks, one column each.
        seed: The seed.
        path: File of the picture; the suffix selects the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots(2, len(tasks), sharex="col", squeeze=False, height_ratios=(3, 1))
    for task, (top, bottom) in zip(tasks, axes.T, strict=True):
        for run in runs:
            if (run["task"], run["seed"]) != (task, seed):
                continue
            ends, losses = curve_of(run)
            top.plot(ends, losses, linewidth=1, label=LABELS[run["policy"]])
            if run["policy"] == "ramp":
                shares = list(itertools.accumulate(shares_of(run)))
                bottom.step(shares, run["sizes"], where="pre", color="gray")
        top.set(title=task, yscale="log")
        bottom.set(xlabel="share of the samples", yticks=(1, 4, 8, 12))
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("workers")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


def shares_of(run: dict[str, Any]) -> Iterator[float]:
    """Yield each step's share of all samples of a run."""
    is_fixed = run["policy"] in ("fixed", "global")
    counts = [1 if is_fixed else size for size in run["sizes"]]
    return (count / sum(counts) for count in counts)


def curve_of(run: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the ends of equal parts of the samples, and the mean loss in each.

    >>> run = {"policy": "ramp", "sizes": [1, 1, 2], "losses": [4.0, 2.0, 1.0]}
    >>> [list(values[29::30]) for values in curve_of(run)]
    [[0.5, 1.0], [2.0, 1.0]]
    """
    ends = np.cumsum(list(shares_of(run)))
    totals = np.concatenate([[0.0], np.cumsum(np.diff(ends, prepend=0.0) * run["losses"])])
    edges = np.linspace(0.0, 1.0, NUM_PARTS + 1)
    sums = np.interp(edges, np.concatenate([[0.0], ends]), totals)
    return edges[1:].round(9).tolist(), (np.diff(sums) * NUM_PARTS).round(9).tolist()
