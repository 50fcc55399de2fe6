"""Cost and correctness of bit-identical results: ``reproducible`` compared with the default mode.

The first part compares step times. The ``reproducible`` mode uses V = 8 shards, and the default
mode uses micro batches of the size of a shard, so that both run the same passes. The reported ratio
is the median over pairs of runs in alternating order. The second part runs short jobs with 1, 2 and
4 ranks, and one that loses a rank on the way: all must end with bit-identical weights. The third
part times the exchange of gradients alone, compared with an all-reduce and an all-gather of every
shard.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ours, report, timeline
from benchmarks.common.workloads import GLOBAL_BATCH_SIZE, MODELS
from benchmarks.peers.run import python_path
from etrain_jupyter import TrainingJob
from etrain_jupyter.log.events import WeightsHashed

SHARDS = 8
WORLD_SIZES = (4, 2, 1)
"""The first size gives the headline figure."""
EXCHANGE_SIZES = (4, 2)
NUMBERS = 10_000_000
"""Elements of the exchanged gradient, as many as the MLP has parameters."""
DIGEST_STEPS = 60
TIMEOUT_S = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--pairs", type=int, help="pairs of runs per world size (default 5)")
    parser.add_argument("--steps", type=int, help="steps per run (default 200)")
    parser.add_argument("--rounds", type=int, help="exchanges of each kind (default 20)")
    parser.add_argument("--workload", choices=MODELS, default="cnn", help="default: cnn")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the ratio at every world size, the digests and the exchange."""
    num_pairs = options.pairs or (1 if options.quick else 5)
    num_steps = options.steps or (100 if options.quick else 200)
    num_rounds = options.rounds or (5 if options.quick else 20)
    sizes = {
        str(world_size): measure_size(options.workload, world_size, num_pairs, num_steps)
        for world_size in WORLD_SIZES
    }
    digests = measure_digests(options.workload)
    return {
        "benchmark": "reproducible",
        "ratio": sizes[str(WORLD_SIZES[0])]["ratio"],
        "digests_equal": len(set(digests.values())) == 1,
        "shards": SHARDS,
        "workload": options.workload,
        "world_sizes": sizes,
        "digests": digests,
        "exchange": {str(size): measure_exchange(size, num_rounds) for size in EXCHANGE_SIZES},
    }


def measure_size(workload: str, world_size: int, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Measure the step times of both modes in alternating runs."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(num_pairs):
        for mode in sorted(times, reverse=pair % 2 == 1):
            times[mode].append(step_time(workload, world_size, num_steps, reproducible=mode))
            name = "reproducible" if mode else "default"
            head = f"reproducible {workload}, {world_size} ranks, pair {pair + 1}/{num_pairs}"
            print(f"{head}, {name}: {times[mode][-1] * 1e3:.1f} ms per step", flush=True)
    ratios = [mine / plain for mine, plain in zip(times[True], times[False], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "reproducible_step_s": statistics.median(times[True]),
        "default_step_s": statistics.median(times[False]),
        "ratios": ratios,
    }


def submit(workload: str, world_size: int, num_steps: int, *, reproducible: bool) -> TrainingJob:
    """Start a job whose passes have the size of a shard in either mode."""
    return ours.submit(
        workload,
        num_steps=num_steps,
        world_size=world_size,
        reproducible={"shards": SHARDS} if reproducible else False,
        batch={"global": GLOBAL_BATCH_SIZE, "micro": GLOBAL_BATCH_SIZE // SHARDS},
    )


def step_time(workload: str, world_size: int, num_steps: int, *, reproducible: bool) -> float:
    """Return the median seconds per step over the second half of the steps at full size."""
    with ours.cluster():
        job = submit(workload, world_size, num_steps, reproducible=reproducible)
        job.result()
    whole = [step.time for step in ours.steps_of(job) if step.world_size == world_size]
    return timeline.ordinary_step(whole[len(whole) // 2 :])


def measure_digests(workload: str) -> dict[str, str]:
    """Return the digest of the final weights of each job, including one with a killed rank."""
    digests = {}
    for name, world_size, has_kill in (
        *((f"{size} ranks", size, False) for size in sorted(WORLD_SIZES)),
        (f"{WORLD_SIZES[0]} ranks, one killed", WORLD_SIZES[0], True),
    ):
        with ours.cluster():
            job = submit(workload, world_size, DIGEST_STEPS, reproducible=True)
            if has_kill:
                ours.wait_for_step(job, DIGEST_STEPS // 2, TIMEOUT_S)
                last = max(w["rank"] for w in job.workers() if w["rank"] is not None)
                os.kill(ours.trainer_of(job, last), signal.SIGKILL)
            job.result()
            hashed = [e for e in job.events() if isinstance(e, WeightsHashed)]
        digests[name] = hashed[-1].digest
        print(f"reproducible {workload}, {name}: weights {digests[name][:12]}", flush=True)
    return digests


def measure_exchange(world_size: int, num_rounds: int) -> dict[str, Any]:
    """Measure the exchange alone, in processes that do nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        choice = [f"--shards={SHARDS}", f"--numbers={NUMBERS}", f"--rounds={num_rounds}"]
        subprocess.run(
            [
                *(sys.executable, *launch, f"--log-dir={folder}"),
                *("-m", "benchmarks.peers.exchange_ranks"),
                *(*choice, f"--json={path}"),
            ],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            timeout=TIMEOUT_S,
        )
        found = json.loads(path.read_text(encoding="utf-8"))
    return {
        **{name: report.median_and_p95(times) for name, times in found["times"].items()},
        "tree_is_exact": found["digests"]["tree"] == found["digests"]["all_gather"],
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables."""
    steps = report.table(
        ("ranks", "reproducible, ms per step", "default, ms per step", "ratio", "pairs"),
        [
            (
                size,
                f"{found['reproducible_step_s'] * 1e3:.1f}",
                f"{found['default_step_s'] * 1e3:.1f}",
                f"{found['ratio']:.3f}",
                " ".join(f"{ratio:.3f}" for ratio in found["ratios"]),
            )
            for size, found in result["world_sizes"].items()
        ],
    )
    digests = report.table(
        ("job", "weights"), [(name, digest[:16]) for name, digest in result["digests"].items()]
    )
    ways = ("tree", "all_reduce", "all_gather")
    exchange = report.table(
        ("ranks", *(f"{way}, ms" for way in ways), "exact"),
        [
            (
                size,
                *(f"{found[way]['median_s'] * 1e3:.0f}" for way in ways),
                "yes" if found["tree_is_exact"] else "NO",
            )
            for size, found in result["exchange"].items()
        ],
    )
    equal = "equal" if result["digests_equal"] else "NOT EQUAL"
    return f"{steps}\n\nWeights: {equal}.\n\n{digests}\n\nExchange alone.\n\n{exchange}"
