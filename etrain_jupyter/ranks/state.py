"""The complete state of a trainer, as named tensors and a JSON header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from etrain_jupyter.ranks.process_group import RankGroup

MODEL, OPTIMIZER = "model.", "optimizer."

Tensors = dict[str, torch.Tensor]


def take_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], Tensors]:
    """Return the state as ``(header, tensors)``; the tensors are the living ones, not copies.

    The header is JSON: parameter groups, and what the optimizer holds that is no tensor.
    """
    tensors = {MODEL + name: value for name, value in model.state_dict().items()}
    packed = optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for index, values in packed["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{index}.{name}"] = value
            else:
                scalars.setdefault(str(index), {})[name] = value
    return {"param_groups": _plain(packed["param_groups"]), "scalars": scalars}, tensors


def put_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    header: dict[str, Any],
    tensors: Tensors,
) -> None:
    """Load what ``take_state`` gave, into a model and an optimizer built by the same code."""
    model.load_state_dict(
        {k.removeprefix(MODEL): v for k, v in tensors.items() if k.startswith(MODEL)}
    )
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        if key.startswith(OPTIMIZER):
            index, name = key.removeprefix(OPTIMIZER).split(".", 1)
            state.setdefault(int(index), {})[name] = value
    for index, values in header["scalars"].items():
        state.setdefault(int(index), {}).update(values)
    groups = header["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _plain(value: Any) -> Any:
    """Make parameter groups JSON: a learning rate may be a tensor, betas are a tuple."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def copy_to_cpu(tensors: Tensors) -> Tensors:
    """Return copies that training does not touch any more."""
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def send_state(group: RankGroup, header: dict[str, Any], tensors: Tensors) -> None:
    """Rank 0's part of a state transfer: the header, then one flat tensor a dtype."""
    layout = [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()
    ]
    text = json.dumps({"header": header, "layout": layout}).encode()
    group.broadcast(torch.tensor([len(text)])).wait()
    group.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8)).wait()
    for dtype in _dtypes(t.dtype for t in tensors.values()):
        parts = [t.detach().reshape(-1) for t in tensors.values() if t.dtype == dtype]
        group.broadcast(torch.cat([p.cpu() for p in parts])).wait()


def receive_state(group: RankGroup) -> tuple[dict[str, Any], Tensors]:
    """Every other rank's part of a state transfer."""
    length = torch.zeros(1, dtype=torch.int64)
    group.broadcast(length).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(text).wait()
    message = json.loads(text.numpy().tobytes())
    layout = [(name, getattr(torch, dtype), shape) for name, dtype, shape in message["layout"]]
    tensors: Tensors = {}
    for dtype in _dtypes(d for _, d, _ in layout):
        chosen = [(name, torch.Size(shape)) for name, d, shape in layout if d == dtype]
        flat = torch.empty(sum(shape.numel() for _, shape in chosen), dtype=dtype)
        group.broadcast(flat).wait()
        for (name, shape), part in zip(
            chosen, torch.split(flat, [shape.numel() for _, shape in chosen]), strict=True
        ):
            tensors[name] = part.view(shape)
    return message["header"], {name: tensors[name] for name, _, _ in layout}


def _dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    return sorted(set(dtypes), key=str)


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, in the order of ``state_dict``."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(name.encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_model_state(path: str | Path) -> Tensors:
    """Return the tensors of a ``model.safetensors`` file by name. Runs no code from it."""
    return load_file(str(path))
