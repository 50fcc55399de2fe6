"""DDP with torchft, based on its ``train_ddp`` example: one replica group of one rank per process.

The replicas request a quorum at each step. Survivors continue without dead replicas, and a
restarted replica heals from a peer. As in the example, each replica has a fixed shard of the data,
so the samples of a dead replica are not trained. The position in the shard follows the manager's
step, so that a restarted replica does not repeat its shard from the beginning (the example leaves
this to the user).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.common.step_log import BEGUN, COMMITTED, UNDONE, StepLog
from benchmarks.peers.training import Task, Trainee, save_checkpoint, share_of


def main() -> None:
    """Train until the replicas' common step reaches the target."""
    task = Task.load(Path(sys.argv[1]))
    replica = int(os.environ["REPLICA_GROUP_ID"])
    trainee = Trainee(task.workload)
    manager = manager_of(trainee, replica)
    if task.checkpoint.exists():
        # Only used if all replicas were lost. Otherwise a living replica's newer state wins.
        state = torch.load(task.checkpoint, map_location="cpu")
        trainee.load(state)
        manager.load_state_dict(state["manager"])
    model = DistributedDataParallel(manager, trainee.model)
    optimizer = Optimizer(manager, trainee.optimizer)
    log = StepLog(task.log_folder)
    while manager.current_step() < task.num_steps:
        make_step(task, trainee, manager, model, optimizer, log, replica)
    # Do not wait: the peers may still be committing. The launcher stops this process later.
    manager.shutdown(wait=False)


def manager_of(trainee: Trainee, replica: int) -> Manager:
    """Create the replica's manager."""

    def load_state_dict(state: dict[str, Any]) -> None:
        trainee.load(state)

    def state_dict() -> dict[str, Any]:
        return trainee.state(0)

    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{replica}",
        hostname="localhost",
        timeout=timedelta(seconds=30),
    )


def make_step(
    task: Task,
    trainee: Trainee,
    manager: Manager,
    model: nn.Module,
    optimizer: Optimizer,
    log: StepLog,
    replica: int,
) -> None:
    """Attempt one update. It is undone if a replica was lost during the update."""
    step = manager.current_step() + 1
    indices = share_of(step, replica, task.world_size)
    optimizer.zero_grad()
    trainee.loss(model, indices).backward()  # type: ignore[no-untyped-call]
    is_healing = not manager.is_participating()
    # Healing changes the step, so read it again.
    step = manager.current_step() + 1
    log.enter(attempt=manager._quorum_id, rank=replica, world_size=manager.num_participants())
    log.write(BEGUN, step)
    optimizer.step()
    is_committed = manager.current_step() == step
    log.write(COMMITTED if is_committed else UNDONE, step, indices=[] if is_healing else indices)
    # The lowest participating replica saves. The checkpoint covers the loss of all replicas.
    if is_committed and task.is_due(step) and manager.participating_rank() == 0:
        state = {**trainee.state(step), "manager": manager.state_dict()}
        save_checkpoint(task.checkpoint, state)


if __name__ == "__main__":
    main()
