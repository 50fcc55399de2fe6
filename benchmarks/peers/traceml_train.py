"""Train one job of ``diagnosed_jobs`` as a plain DDP script that TraceML instruments.

Run by ``traceml run``, once per rank; the job's name is in ``DIAGNOSED_JOB``.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import traceml_ai as traceml
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.advice.diagnosed_jobs import BODY, CROSS_ENTROPY, JOBS, build

SECONDS = 12.0
"""Duration of the training."""


def main() -> None:
    """Train until the time is over."""
    slow = JOBS[os.environ["DIAGNOSED_JOB"]]
    body: dict[str, Any] = {**BODY, **slow.keys}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = body["data"]
    train = build(data["train"])()
    local_batch = max(1, body["batch"]["global"] // dist.get_world_size())
    loader = DataLoader(
        train,
        batch_size=local_batch,
        sampler=DistributedSampler(train),
        num_workers=data.get("num_workers", 0),
        drop_last=True,
    )
    model = DistributedDataParallel(build(body["model"])())
    # A function of the module, or one of torch's optimizers.
    named = body["optimizer"]
    if isinstance(named, str):
        optimizer = build(named)(model.parameters())
    else:
        optimizer = getattr(torch.optim, named["name"])(model.parameters(), lr=named["lr"])
    is_plain = body["loss"] == CROSS_ENTROPY
    loss_of = torch.nn.functional.cross_entropy if is_plain else build(body["loss"])
    metrics = [build(name) for name in body.get("metrics", {}).values()]
    evaluated = list(DataLoader(build(data["eval"])(), local_batch)) if "eval" in data else []
    traceml.init(mode="auto")
    ends_at, step, is_over = time.monotonic() + SECONDS, 0, False
    while not is_over:
        for x, y in loader:
            with traceml.trace_step(model):
                optimizer.zero_grad(set_to_none=True)
                output = model(x)
                loss = loss_of(output, y)
                for metric in metrics:
                    metric(output.detach(), y)
                loss.backward()
                optimizer.step()
                step += 1
                if evaluated and step % 10 == 0:
                    evaluate(model.module, evaluated, loss_of)
                if body["checkpoint"]["every"] == "1 steps" and dist.get_rank() == 0:
                    save(model.module, optimizer)
            # All ranks stop after the same step.
            flag = torch.tensor([float(time.monotonic() > ends_at)])
            dist.all_reduce(flag)
            is_over = bool(flag > 0)
            if is_over:
                break
    dist.destroy_process_group()


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{os.environ['DIAGNOSED_FOLDER']}/checkpoint.pt")


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: list[Any], loss_of: Any) -> None:
    """Evaluate on this rank's part of the set."""
    for x, y in batches[dist.get_rank() :: dist.get_world_size()]:
        loss_of(model(x), y)


if __name__ == "__main__":
    main()
