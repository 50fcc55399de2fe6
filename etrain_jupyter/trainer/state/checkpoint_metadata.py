"""What a checkpoint says of itself, and how its state goes into a job that was changed since.

Chance needs no entry: every draw follows from the seed, the step and the rank or shard, and the
order of the samples from the seed and the epoch. So ``seed`` and the counters are all of it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from etrain_jupyter import __version__
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.trainer.state.capture import put_state
from etrain_jupyter.trainer.state.packing import StateError, Tensors
from etrain_jupyter.trainer.workload import Workload

Warn = Callable[[str], None]


def about(
    config: TrainConfig, optimizer: torch.optim.Optimizer, code_digest: str
) -> dict[str, Any]:
    """Return what ``state.json`` says besides the state."""
    return {
        "versions": {
            "etrain_jupyter": __version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "config": config.model_dump(mode="json"),
        "config_digest": config_digest(config),
        "code_digest": code_digest,
        "seed": config.seed,
        "optimizer": _kind_of(optimizer),
    }


def config_digest(config: TrainConfig) -> str:
    """Return the SHA-256 of a configuration's JSON form."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def put_checkpoint(
    workload: Workload,
    header: dict[str, Any],
    tensors: Tensors,
    *,
    config: TrainConfig | None,
    warn: Warn,
) -> None:
    """Load a checkpoint's state; what the job does not have any more, or has new, begins anew.

    Without ``about``, as an older version wrote it, the state must be that of the same job.

    Raises:
        CheckpointError: If it is the state of another model.
    """
    told = header.get("about") or {}
    header = _without_lost_parts(workload, header, warn)
    optimizer = workload.optimizer
    rates = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    is_same_kind = told.get("optimizer", _kind_of(optimizer)) == _kind_of(optimizer)
    target = optimizer
    if not is_same_kind:
        warn(f"the optimizer was {told['optimizer']} and is {_kind_of(optimizer)}: it begins anew")
        target = torch.optim.SGD(workload.model.parameters(), lr=0.0)
        header = header | {"optimizer": {"state": [], "param_groups": _plain_groups(target)}}
    try:
        put_state(workload.model, target, header, tensors, workload.extras)
    except (StateError, RuntimeError, KeyError) as exc:
        words = " ".join(str(exc).split())
        raise CheckpointError(
            f"the checkpoint does not fit this model ({words}). Nothing was trained, and all "
            "checkpoints are there. Resume with the model that was trained before"
        ) from exc
    asked = (told.get("config") or {}).get("optimizer")
    if not is_same_kind or config is None or asked is None:
        return
    if asked != config.optimizer.model_dump(mode="json"):
        warn("the optimizer has other options than before: those of the cell hold")
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group.update(own)


def _without_lost_parts(workload: Workload, header: dict[str, Any], warn: Warn) -> dict[str, Any]:
    extras = header.get("extras", {})
    lost = sorted(set(extras) - set(workload.extras))
    for name in lost:
        warn(f"the checkpoint has the state of '{name}', which this job does not use any more")
    return header | {"extras": {k: v for k, v in extras.items() if k not in lost}}


def _plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    return groups


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__qualname__
