"""Wrap a model in FSDP2 whose weights are already in shards, and unwrap it in place.

``fully_shard`` has no counterpart that removes it, but a model lives longer than a generation, in
which the number of ranks is fixed. So this module removes what ``fully_shard`` adds to a module:
its class, hooks, state and parameters. It never needs the whole model: it wraps a model without
data (on torch's meta device) and then gives FSDP the memory of this rank's shards, which FSDP
reads and never writes.

The collectives run in the generation's group, so that an abort ends every wait, also in the
hooks of a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup


class Place(NamedTuple):
    """An attribute of a module that is a parameter."""

    module: nn.Module
    name: str


class _InHostMemory:
    """A collective of the generation's group, whose buffers are in host memory."""

    def __init__(self, group: RankGroup, watch: Stopwatch) -> None:
        self._group, self._watch = group, watch

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_InHostMemory, AllGather):
    """Collects the shards of a block's weights."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        with self._watch.exchanging():
            self._group.all_gather(output_tensor, input_tensor).wait()


class _ReduceScatter(_InHostMemory, ReduceScatter):
    """Sums a block's gradients; each rank receives its shard of the sum."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        with self._watch.exchanging():
            self._group.reduce_scatter(output_tensor, input_tensor).wait()


def places_of(module: nn.Module) -> dict[int, list[Place]]:
    """Return the places of each parameter, by its ``id``; tied weights have several."""
    found: dict[int, list[Place]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(Place(owner, name))
    return found


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: FSDP collects the weights of one at a time.

    Blocks are the outermost children of an ``nn.ModuleList`` or ``nn.Sequential`` that have trained
    parameters and a class in common. A block that shares a parameter with another part of the
    model is left out: its weights belong to the rest of the model.
    """
    places = places_of(module)

    def is_closed(block: nn.Module) -> bool:
        inside = set(block.modules())
        return all(place.module in inside for p in block.parameters() for place in places[id(p)])

    found: list[nn.Module] = []

    def visit(parent: nn.Module) -> None:
        children = list(dict.fromkeys(parent.children()))
        kinds = [type(child) for child in children]
        for child in children:
            is_list = isinstance(parent, nn.ModuleList | nn.Sequential)
            is_repeated = is_list and kinds.count(type(child)) > 1
            has_trained = any(p.requires_grad for p in child.parameters())
            if is_repeated and has_trained and is_closed(child) and _is_callable(child):
                found.append(child)
            else:
                visit(child)

    visit(module)
    return found


def _is_callable(module: nn.Module) -> bool:
    # Containers without a forward pass of their own cannot have FSDP's hooks.
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


class WrappedModel:
    """A model in FSDP2, until ``unwrap``.

    Args:
        module: The module whose forward pass uses all parameters.
        group: The generation's process group, with more than one rank.
        watch: Measures the exchanges.
        parameters: The trained parameters, which ``unwrap`` puts back; their data is not used.
        shapes: Their shapes.
        memory: This rank's rows of each parameter, with room for ``padded_rows``.
    """

    def __init__(
        self,
        module: nn.Module,
        group: RankGroup,
        watch: Stopwatch,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[torch.Size],
        memory: Sequence[torch.Tensor],
    ) -> None:
        self._module = module
        self._group = group
        self._parameters = parameters
        places = places_of(module)
        self._places = [places[id(parameter)] for parameter in parameters]
        self._params: list[Any] = []
        """FSDP's object for each parameter."""
        mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), "cpu")
        trained = {id(parameter) for parameter in parameters}
        ignored = {p for p in module.parameters() if id(p) not in trained}
        for parameter, shape, spots in zip(parameters, shapes, self._places, strict=True):
            empty = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
            for module_, name in spots:
                module_._parameters[name] = empty
        self._classes: list[tuple[nn.Module, type]] = []
        for each in (*find_blocks(module), module):
            self._classes.append((each, type(each)))
            fully_shard(each, mesh=mesh, ignored_params=ignored)
        self._adopt(memory)
        self._set_up(watch)

    def _states(self) -> list[Any]:
        found = [_state_of(module) for module, _ in self._classes]
        return [state for state in found if state is not None]

    def _adopt(self, memory: Sequence[torch.Tensor]) -> None:
        by_place: dict[tuple[int, str], Any] = {}
        for state in self._states():
            for param_group in state._fsdp_param_groups:
                for param in param_group.fsdp_params:
                    info = param._module_info
                    by_place[id(info.module), info.param_name] = param
                # FSDP would copy a shard that it has to pad.
                param_group._reset_sharded_params = True
        for spots, rows in zip(self._places, memory, strict=True):
            [param] = {
                id(p): p for s in spots if (p := by_place.get((id(s.module), s.name)))
            }.values()
            self._params.append(param)
            padded = rows.view(param.padded_sharded_param_size)
            own = padded.narrow(0, 0, param.sharded_size[0])
            param._sharded_param_data = padded.view(-1)
            param.sharded_param = nn.Parameter(param.to_sharded_dtensor(own))
            param._setattr_on_modules(param.sharded_param)

    def _set_up(self, watch: Stopwatch) -> None:
        all_gather = _AllGather(self._group, watch)
        reduce_scatter = _ReduceScatter(self._group, watch)
        for module, _ in self._classes:
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(all_gather)
            module.set_custom_reduce_scatter(reduce_scatter)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return this rank's rows of each parameter's gradient, flat; None without a gradient."""
        found: list[torch.Tensor | None] = []
        for param in self._params:
            grad = param.sharded_param.grad
            found.append(None if grad is None else grad._local_tensor.reshape(-1))
        return found

    def forget_gradients(self) -> None:
        """Free the gradients, also those of an interrupted backward pass."""
        for param in self._params:
            param.sharded_param.grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
            param.unsharded_accumulated_grad = None

    def unwrap(self) -> None:
        """Remove FSDP from the model, in whatever state a failed pass has left it."""
        for state in self._states():
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            for param_group in state._fsdp_param_groups:
                for handles in (
                    param_group._module_to_pre_save_state_dict_hook_handle,
                    param_group._module_to_pre_load_state_dict_hook_handle,
                ):
                    for handle in handles.values():
                        handle.remove()
                for param in param_group.fsdp_params:
                    param._post_load_hook_handle.remove()
        for module, kind in self._classes:
            module.__class__ = kind
            _composable_state._module_state_mapping.pop(module, None)
            module.__dict__.pop(STATE_KEY, None)
            module.__dict__.pop(REGISTRY_KEY, None)
        for module in self._module.modules():
            module.__dict__.pop("_is_fsdp_managed_module", None)
            module.__dict__.pop("_fsdp_use_orig_params", None)
        for parameter, spots in zip(self._parameters, self._places, strict=True):
            for module, name in spots:
                module._parameters[name] = parameter
        self._params, self._classes = [], []


def _state_of(module: nn.Module) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]
