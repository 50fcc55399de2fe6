"""DDP under elastic ``torchrun``, as its documentation recommends: save often, load on every start.

Each worker is a separate node with its own agent. When a worker is lost, the agents stop and
restart all the others, and this script resumes from the newest checkpoint.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.step_log import BEGUN, COMMITTED, StepLog
from benchmarks.peers.training import Task, Trainee, save_checkpoint, share_of


def main() -> None:
    """Train from the newest checkpoint to the target."""
    task = Task.load(Path(sys.argv[1]))
    dist.init_process_group("gloo")
    trainee = Trainee(task.workload)
    start = 0
    if task.checkpoint.exists():
        start = trainee.load(torch.load(task.checkpoint, map_location="cpu"))
    log = StepLog(task.log_folder)
    log.enter(attempt=agree_on_attempt(), rank=dist.get_rank(), world_size=dist.get_world_size())
    train(task, trainee, log, start)
    log.close()
    dist.destroy_process_group()


def agree_on_attempt() -> int:
    """Return a number that is the same on all ranks of this group and different in every group."""
    number = torch.tensor([time.time_ns()])
    dist.broadcast(number, 0)
    return int(number.item())


def train(task: Task, trainee: Trainee, log: StepLog, start: int) -> None:
    """Run the steps after ``start``; rank 0 saves the checkpoints."""
    model = DistributedDataParallel(trainee.model)
    for step in range(start + 1, task.num_steps + 1):
        indices = share_of(step, log.rank, log.world_size)
        log.write(BEGUN, step)
        trainee.optimizer.zero_grad()
        trainee.loss(model, indices).backward()  # type: ignore[no-untyped-call]
        trainee.optimizer.step()
        log.write(COMMITTED, step, indices=indices)
        if task.is_due(step) and log.rank == 0:
            save_checkpoint(task.checkpoint, trainee.state(step))


if __name__ == "__main__":
    main()
