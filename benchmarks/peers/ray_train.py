"""Ray Train driver: a cluster on this machine, elastic workers, a checkpoint every K steps.

The script follows Ray's own preemption benchmark: rank 0 reports checkpoints, the ranks do not
report metrics between checkpoints (each report is a barrier), and failures are retried without
limit.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

from benchmarks.common.step_log import BEGUN, COMMITTED, StepLog
from benchmarks.peers.elastic_train import agree_on_attempt
from benchmarks.peers.training import Task, Trainee, save_checkpoint, share_of

OBJECT_STORE_BYTES = 100 * 2**20
RESIZE_INTERVAL_S = 5.0
"""Ray's default is 60 s; with it, a group would train below its full size for a minute."""


def main() -> None:
    """Start the cluster, train, and shut the cluster down, also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    task = Task.load(Path(sys.argv[1]))
    # Ray creates its sockets in this folder, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=task.world_size,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        try:
            trainer_of(task).fit()
        finally:
            ray.shutdown()


def trainer_of(task: Task) -> TorchTrainer:
    """Return the trainer, with 1 to ``world_size`` workers."""
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(task.folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=(1, task.world_size),
            elastic_resize_monitor_interval_s=RESIZE_INTERVAL_S,
        ),
        run_config=RunConfig(
            name="benchmark",
            storage_path=str(task.folder / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def train(config: dict[str, Any]) -> None:
    """Train on one worker, from the newest checkpoint."""
    torch.set_num_threads(1)
    task = Task.load(Path(config["folder"]))
    trainee = Trainee(task.workload)
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            start = trainee.load(torch.load(Path(folder) / "state.pt", map_location="cpu"))
    model = prepare_model(trainee.model)
    log = StepLog(task.log_folder)
    log.enter(attempt=agree_on_attempt(), rank=dist.get_rank(), world_size=dist.get_world_size())
    for step in range(start + 1, task.num_steps + 1):
        make_step(trainee, model, log, step)
        if task.is_due(step):
            report(trainee, step, log.rank)


def make_step(trainee: Trainee, model: nn.Module, log: StepLog, step: int) -> None:
    """Run one update and log it."""
    indices = share_of(step, log.rank, log.world_size)
    log.write(BEGUN, step)
    trainee.optimizer.zero_grad()
    trainee.loss(model, indices).backward()  # type: ignore[no-untyped-call]
    trainee.optimizer.step()
    log.write(COMMITTED, step, indices=indices)


def report(trainee: Trainee, step: int, rank: int) -> None:
    """Report a checkpoint to Ray. Every rank calls this; rank 0 provides the files."""
    metrics = {"step": step, "time": time.time()}
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / "state.pt", trainee.state(step))
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    main()
