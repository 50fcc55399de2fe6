"""Optimizer state of a range of elements, and how it is described to other ranks.

The state of one parameter consists of *vectors*, with one value for each of its elements, and
*scalars*, such as the step counter, which are the same for all elements. Vectors are cut where
shards begin; scalars are copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from etrain_jupyter.rules.optimizer_shards import Range, overlap, shards_of
from etrain_jupyter.trainer.state.packing import StateError, Tensors
from etrain_jupyter.trainer.state.transfer_plan import name_of

COUNTERS = ("step", "mu_product")
"""Scalars that torch keeps in host memory."""
SCALARS = (*COUNTERS, "eta", "mu")
"""State of torch's elementwise optimizers that is the same for all elements of a parameter."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """The state that an optimizer keeps for one parameter, without the vectors' values."""

    vectors: tuple[tuple[str, torch.dtype], ...]
    """Name and type of each vector, sorted by name."""
    scalars: Tensors
    """Zero-dimensional tensors by name."""

    @classmethod
    def of(cls, name: str, state: Mapping[str, Any]) -> Form:
        """Describe the state of the parameter ``name``.

        Raises:
            StateError: If the state cannot be divided.
        """
        vectors, scalars = [], {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise StateError(
                    f"the optimizer's state {key!r} of {name} is a {type(value).__name__}, which "
                    "cannot be divided among the workers. Write shard: none."
                )
            if key in SCALARS:
                scalars[key] = value
            else:
                vectors.append((key, value.dtype))
        return cls(vectors=tuple(sorted(vectors)), scalars=scalars)

    def to_json(self) -> dict[str, Any]:
        """Return this form as JSON; ``from_json`` restores it exactly."""
        return {
            "vectors": [[name, name_of(dtype)] for name, dtype in self.vectors],
            "scalars": {k: [name_of(v.dtype), v.item()] for k, v in self.scalars.items()},
        }

    @classmethod
    def from_json(cls, packed: Mapping[str, Any]) -> Form:
        """Return the form that ``to_json`` has packed."""
        return cls(
            vectors=tuple((name, getattr(torch, dtype)) for name, dtype in packed["vectors"]),
            scalars={
                name: torch.tensor(value, dtype=getattr(torch, dtype))
                for name, (dtype, value) in packed["scalars"].items()
            },
        )


class Slice(NamedTuple):
    """A range of one parameter's elements."""

    param: int
    """Index of the parameter among those that the optimizer updates."""
    first: int
    stop: int


class Layout:
    """The parameters that are divided, and their places in the common index.

    Args:
        named: Name and parameter, in the order of the optimizer's groups.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [parameter.shape for parameter in self.parameters]
        """Shapes of the parameters."""
        self.starts = [0]
        for shape in self.shapes:
            self.starts.append(self.starts[-1] + shape.numel())

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.starts[-1]

    def shards(self, rank: int, world_size: int) -> tuple[Range, ...]:
        """Return the ranges that a rank holds, its own shard first."""
        return shards_of(rank, world_size, self.starts)

    def slices(self, span: Range) -> list[Slice]:
        """Cut a range of the common index where parameters begin."""
        found = []
        for index, start in enumerate(self.starts[:-1]):
            if common := overlap(span, (start, self.starts[index + 1])):
                found.append(Slice(index, common[0] - start, common[1] - start))
        return found

    def weights(self, part: Slice) -> torch.Tensor:
        """Return a part of a parameter as a flat view of its memory."""
        return self.parameters[part.param].detach().view(-1)[part.first : part.stop]

    def gradient(self, part: Slice) -> torch.Tensor | None:
        """Return the same part of the parameter's gradient; None without a gradient."""
        grad = self.parameters[part.param].grad
        # The strides of a gradient may differ from those of its contiguous parameter; ``reshape``
        # then copies the gradient.
        return None if grad is None else grad.reshape(-1)[part.first : part.stop]


class HeldShard:
    """One shard's optimizer state, in an optimizer of its own.

    Args:
        layout: All parameters.
        span: The shard, as a range of the common index.
        template: The optimizer whose class and parameter groups apply.
    """

    def __init__(self, layout: Layout, span: Range, template: torch.optim.Optimizer) -> None:
        self.span = span
        self._layout = layout
        self._template = template
        self._places = {id(p): index for index, p in enumerate(layout.parameters)}
        self.parts = layout.slices(span)
        self._weights = [layout.weights(part) for part in self.parts]
        """Flat tensors, which the optimizer updates as its parameters."""
        by_index = dict(zip((part.param for part in self.parts), self._weights, strict=True))
        groups = []
        for group in template.param_groups:
            indices = [self._places[id(parameter)] for parameter in group["params"]]
            mine = [by_index[index] for index in indices if index in by_index]
            groups.append({**group, "params": mine})
        # Restore the optimizer as torch does when it unpickles one. The constructor may take other
        # arguments than it keeps as ``defaults``, and may reject a group without parameters.
        self.optimizer = template.__class__.__new__(template.__class__)
        self.optimizer.__setstate__(
            {"defaults": template.defaults, "state": defaultdict(dict), "param_groups": groups}
        )

    def step(self) -> None:
        """Update this shard's weights."""
        # Copy the template's options, because a schedule changes them.
        for own, theirs in zip(
            self.optimizer.param_groups, self._template.param_groups, strict=True
        ):
            own.update({key: value for key, value in theirs.items() if key != "params"})
        for weights, part in zip(self._weights, self.parts, strict=True):
            weights.grad = self._layout.gradient(part)
        self.optimizer.step()
        for weights in self._weights:
            weights.grad = None

    def adopt(self, forms: Mapping[int, Form], vectors: Mapping[tuple[int, str], Any]) -> None:
        """Set the state: ``vectors`` by parameter and name, for the parameters in ``forms``."""
        for weights, part in zip(self._weights, self.parts, strict=True):
            form = forms.get(part.param)
            if form is not None:
                state: dict[str, Any] = {
                    name: value.to(self._device_of(name, weights), copy=True)
                    for name, value in form.scalars.items()
                }
                state |= {name: vectors[part.param, name] for name, _ in form.vectors}
                self.optimizer.state[weights] = state

    def _device_of(self, scalar: str, weights: torch.Tensor) -> torch.device:
        # torch reads counters on the host, except in these implementations.
        groups = self._template.param_groups
        follows = any(g.get("capturable") or g.get("fused") for g in groups)
        return torch.device("cpu") if scalar in COUNTERS and not follows else weights.device

    def state_of(self, part: Slice) -> Mapping[str, Any]:
        """Return the state of one of ``parts``; empty before the first update."""
        state: Mapping[str, Any] = self.optimizer.state.get(
            self._weights[self.parts.index(part)], {}
        )
        return state

    # --- as a source of state ---

    def form(self, index: int) -> Form | None:
        """Return the form of a parameter's state; None if this rank has no state for it."""
        for part in self.parts:
            if part.param == index and (state := self.state_of(part)):
                return Form.of(self._layout.names[index], state)
        return None

    def read(self, name: str, part: Slice) -> torch.Tensor:
        """Return a view of a part of a vector."""
        [own] = [one for one in self.parts if one.param == part.param]
        vector: torch.Tensor = self.state_of(own)[name]
        return vector[part.first - own.first : part.stop - own.first]

    @property
    def num_bytes(self) -> int:
        """Memory of the state."""
        states = (self.state_of(part) for part in self.parts)
        return sum(value.nbytes for state in states for value in state.values())


class NewShard:
    """Memory for one shard's optimizer state, before it is filled.

    Args:
        layout: All parameters.
        span: The shard, as a range of the common index.
        forms: Form of each parameter's state; parameters without state are missing.
    """

    def __init__(self, layout: Layout, span: Range, forms: Mapping[int, Form]) -> None:
        self.span = span
        self.forms = forms
        self.vectors: dict[tuple[int, str], torch.Tensor] = {}
        self._layout = layout
        self._firsts: dict[int, int] = {}
        self.parts = layout.slices(span)
        for part in self.parts:
            self._firsts[part.param] = part.first
            device = layout.parameters[part.param].device
            for name, dtype in vectors_of(part, forms):
                length = part.stop - part.first
                self.vectors[part.param, name] = torch.empty(length, dtype=dtype, device=device)

    def slots(self, span: Range) -> list[torch.Tensor]:
        """Return the memory for a range within the shard, in the order of ``read_span``."""
        found = []
        for part in self._layout.slices(span):
            start = self._firsts[part.param]
            for name, _ in vectors_of(part, self.forms):
                vector = self.vectors[part.param, name]
                found.append(vector[part.first - start : part.stop - start])
        return found


def vectors_of(part: Slice, forms: Mapping[int, Form]) -> tuple[tuple[str, torch.dtype], ...]:
    """Return name and type of each vector of a part, in the order in which they are sent."""
    form = forms.get(part.param)
    return () if form is None else form.vectors
