"""Capture a trainer's complete state as named tensors and a JSON header, and load it again.

The prefix of a tensor's name identifies its owner:

==============  ==========================================================
``model.``      entries of the model's ``state_dict``
``buffer.``     buffers that are not in the ``state_dict``
``module.``     results of ``get_extra_state`` of the model's modules
``optimizer.``  the optimizer's state
``extra.NAME.`` another stateful component: a gradient scaler, a scheduler
==============  ==========================================================
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import nn

from etrain_jupyter.trainer.state.packing import StateError, Tensors, pack, unpack
from etrain_jupyter.trainer.state.pieces import PIECE_BYTES

MODEL, BUFFER, MODULE, OPTIMIZER, EXTRA = "model.", "buffer.", "module.", "optimizer.", "extra."


class Stateful(Protocol):
    """A stateful component other than the model and the optimizer: a scaler, a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested numbers, strings and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Load a state that ``state_dict`` has returned."""
        ...


Extras = Mapping[str, Stateful]
NO_EXTRAS: Extras = MappingProxyType({})


# --- capture ---


def take_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, extras: Extras = NO_EXTRAS
) -> tuple[dict[str, Any], Tensors]:
    """Return the state as ``(header, tensors)``; the tensors are not copies.

    The header, which can be written as JSON, contains the optimizer's parameter groups and
    everything that is not a tensor.

    Raises:
        StateError: If a value cannot be sent or saved.
    """
    # ``state_dict`` alone is incomplete: a non-persistent buffer may still influence training, and
    # a joining rank must compute the same results as the others.
    tensors: Tensors = {}
    modules: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        # Other entries are results of a module's ``get_extra_state``.
        if isinstance(value, torch.Tensor):
            _check(MODEL + name, value)
            tensors[MODEL + name] = value
        else:
            modules[name] = pack(value, name=MODULE + name, tensors=tensors)
    living = living_tensors(model)
    tensors |= {name: t.detach() for name, t in living.items() if name.startswith(BUFFER)}
    header: dict[str, Any] = {
        "modules": modules,
        "optimizer": _take_optimizer(optimizer, tensors),
        "extras": {
            name: pack(part.state_dict(), name=EXTRA + name, tensors=tensors)
            for name, part in extras.items()
        },
    }
    for name, tensor in tensors.items():
        _check(name, tensor)
    header["host"] = _names_in_host_memory(tensors, optimizer)
    return header, tensors


def _take_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> dict[str, Any]:
    held = optimizer.state_dict()
    if not _has_standard_state(optimizer):
        return {"whole": pack(held, name=OPTIMIZER + "whole", tensors=tensors)}
    # Stored as pairs because JSON would turn the integer keys of a dict into strings.
    state = [
        [key, pack(values, name=f"{OPTIMIZER}{key}", tensors=tensors)]
        for key, values in held["state"].items()
    ]
    groups = pack(held["param_groups"], name=OPTIMIZER + "param_groups", tensors=tensors)
    return {"state": state, "param_groups": groups}


def _has_standard_state(optimizer: torch.optim.Optimizer) -> bool:
    # If the optimizer uses torch's own ``state_dict``, its state can be read and set directly,
    # without copies. An override or a hook may convert the state in a way that only its counterpart
    # can undo.
    base, kind = torch.optim.Optimizer, type(optimizer)
    has_hooks = any(
        getattr(optimizer, f"_optimizer_{when}_hooks", None)
        for when in (
            "state_dict_pre",
            "state_dict_post",
            "load_state_dict_pre",
            "load_state_dict_post",
        )
    )
    overrides = (
        kind.state_dict is not base.state_dict or kind.load_state_dict is not base.load_state_dict
    )
    return not has_hooks and not overrides


def _names_in_host_memory(tensors: Tensors, optimizer: torch.optim.Optimizer) -> list[str]:
    # Returns the tensors that stay in host memory even if the model is on a GPU. The sender and the
    # receiver may have different kinds of devices, so the tensor's current device does not decide
    # this:
    #
    #     sender's model   tensor in host memory          stays in host memory on the receiver
    #     on a GPU         any                            yes: its owner keeps it there
    #     on the CPU       of an extra                    yes
    #     on the CPU       a step counter                 yes, unless capturable or fused
    #     on the CPU       other state of the optimizer   no: it follows the parameters
    is_on_device = any(t.is_cuda for name, t in tensors.items() if name.startswith(MODEL))
    follows = any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups)
    return [
        name
        for name, tensor in tensors.items()
        if not name.startswith((MODEL, BUFFER))
        and not tensor.is_cuda
        and (is_on_device or name.startswith(EXTRA) or (_is_counter(name) and not follows))
    ]


def _is_counter(name: str) -> bool:
    # torch keeps the step counters of most optimizers in host memory.
    return name.startswith(OPTIMIZER) and name.endswith(".step")


def _check(name: str, tensor: torch.Tensor) -> None:
    kind = ""
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper around other tensors
        kind = type(tensor).__name__
    elif tensor.layout is not torch.strided:
        kind = f"tensor of layout {tensor.layout}"
    elif tensor.is_quantized or tensor.is_meta:
        kind = "quantized tensor" if tensor.is_quantized else "tensor without data (meta)"
    if kind:
        raise StateError(
            f"{name} is a {kind}; only ordinary dense tensors can be sent to other ranks and "
            "saved. Convert it in the function that builds the model."
        )


# --- load ---


def living_tensors(model: nn.Module) -> Tensors:
    """Return the model's own parameters and buffers, by their names in the state."""
    entries = model.state_dict()
    own: Tensors = {}
    # Tied weights have several names, and all of them must be found.
    own |= dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    living: Tensors = {}
    for name, tensor in own.items():
        if name not in entries:
            living[BUFFER + name] = tensor
        # A hook may convert a parameter in ``state_dict``. The entry then has other memory, and
        # only ``load_state_dict`` can convert it back.
        elif isinstance(entries[name], torch.Tensor) and is_same_memory(entries[name], tensor):
            living[MODEL + name] = tensor
    return living


def own_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, extras: Extras = NO_EXTRAS
) -> Tensors:
    """Return all components' tensors into which a new state can be written."""
    own: Tensors = {}
    # A component may return copies. Writing into them does no harm, because the component loads
    # them afterwards.
    for name, part in extras.items():
        pack(part.state_dict(), name=EXTRA + name, tensors=own)
    # An optimizer that overrides ``state_dict`` may return copies.
    if _has_standard_state(optimizer):
        _take_optimizer(optimizer, own)
    return own | living_tensors(model)


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both tensors are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def put_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    header: dict[str, Any],
    tensors: Tensors,
    extras: Extras = NO_EXTRAS,
) -> None:
    """Load a result of ``take_state`` into objects built by the same code.

    Tensors that are already the model's own are not copied; the optimizer adopts the given tensors
    without a copy if they are on the right device.

    Raises:
        StateError: If the state does not fit the model, the optimizer or the extras.
    """
    _put_model(model, header["modules"], tensors)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    # Step counters of most optimizers must stay in host memory, whatever the model's device is.
    host = frozenset(header["host"])

    def find(name: str) -> torch.Tensor:
        return tensors[name] if name in host else tensors[name].to(device)

    _put_optimizer(optimizer, header["optimizer"], functools.cache(find))
    unknown = sorted(set(header["extras"]) - set(extras))
    if unknown:
        raise StateError(
            f"the state has components that this trainer does not have: {', '.join(unknown)}"
        )
    for name, packed in header["extras"].items():
        extras[name].load_state_dict(unpack(packed, find))


@torch.no_grad()
def _put_model(model: nn.Module, modules: dict[str, Any], tensors: Tensors) -> None:
    living = living_tensors(model)
    given = {name: t for name, t in tensors.items() if name.startswith(MODEL)}
    # After a state transfer, all tensors are already the model's own, and there is nothing to load.
    if modules or any(tensor is not living.get(name) for name, tensor in given.items()):
        values: dict[str, Any] = {name.removeprefix(MODEL): t for name, t in given.items()}
        values |= {name: unpack(value, tensors.__getitem__) for name, value in modules.items()}
        model.load_state_dict(values)
    for name, tensor in living.items():
        value = tensors.get(name)
        # A cache that has grown on another rank has a different shape. On this rank, it grows when
        # it is used.
        if name.startswith(BUFFER) and value is not None and value.shape == tensor.shape:
            tensor.copy_(value)


def _put_optimizer(optimizer: torch.optim.Optimizer, packed: dict[str, Any], find: Any) -> None:
    if "whole" in packed:
        optimizer.load_state_dict(unpack(packed["whole"], find))
        return
    groups = unpack(packed["param_groups"], find)
    state = {key: unpack(values, find) for key, values in packed["state"]}
    if not _has_standard_state(optimizer):
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return
    mine = optimizer.param_groups
    sizes, their_sizes = ([len(g["params"]) for g in some] for some in (mine, groups))
    if sizes != their_sizes:
        raise StateError(
            f"the optimizer has parameter groups of {sizes} tensors, but the state has groups of "
            f"{their_sizes}. Build the same model and optimizer on every rank."
        )
    # torch's load_state_dict would copy everything twice and cast it to the parameters' types.
    # Here, the state's keys (parameter indices) are replaced by this rank's parameters, in order.
    owners: dict[Any, torch.Tensor] = {}
    for own, theirs in zip(mine, groups, strict=True):
        params = own["params"]
        owners |= dict(zip(theirs["params"], params, strict=True))
        # The dict itself is kept because a scheduler from the notebook may refer to it.
        own.clear()
        own.update({**theirs, "params": params})
    owned = defaultdict(dict, {owners.get(key, key): values for key, values in state.items()})
    optimizer.__setstate__({"state": owned, "param_groups": mine})


# --- digests ---


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 digest of a model's ``state_dict``, in its order."""
    return digest_of_tensors(named_tensors(model).items())


def named_tensors(model: nn.Module) -> Tensors:
    """Return the tensors of a model's ``state_dict``, in its order; not copies."""
    state = model.state_dict()
    return {name: t.detach() for name, t in state.items() if isinstance(t, torch.Tensor)}


def digest_of_tensors(
    named: Iterable[tuple[str, torch.Tensor]], progress: Callable[[], None] = lambda: None
) -> str:
    """Return the SHA-256 digest of the names and values, in the given order.

    Args:
        named: The tensors; device tensors are copied one at a time.
        progress: Called after each piece.
    """
    digest = hashlib.sha256()
    for name, value in named:
        flat: Any = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(name.encode())
        for start in range(0, len(flat), PIECE_BYTES):
            digest.update(flat[start : start + PIECE_BYTES])
            progress()
    return digest.hexdigest()


def load_model_state(path: str | Path) -> Tensors:
    """Return the tensors in a ``model.safetensors`` file by name. Never runs code from the file."""
    return load_file(str(path))
