"""Weights and optimizer state in shards, for ``shard: full``: an experiment on FSDP2.

Each rank owns some rows of every weight, in which FSDP2 gives it the sum of the gradients, and has
a copy of the previous rank's. Before an update, each rank sends its rows of the gradient to the
next rank; then both make the same update, by the rules of ``sharded_optimizer``.

The parameters of the job's model are empty in a generation of several ranks::

    between generations   the shards have the weights, and the model is unwrapped
    divide                all ranks receive the shards of the new number of ranks
    steps                 FSDP2 wraps the model around the memory of the own shard
    evaluation, digest,   the model is unwrapped and has all weights, on the ranks that need them
    checkpoint
    a single rank         the parameters are the shard, and nothing is wrapped
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from etrain_jupyter.rules.sharding.optimizer_shards import Move, Range, plan_moves
from etrain_jupyter.rules.sharding.row_shards import padded_rows, row_shards
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.sharding.held_state import Form, HeldShard, Layout, NewShard, Slice
from etrain_jupyter.trainer.sharding.range_exchange import RangeExchange, exchange_moves
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from etrain_jupyter.trainer.sharding.fsdp_wrap import WrappedModel

WEIGHTS = "param"
"""Name of the weights among the vectors of a parameter's state."""


class RowLayout(Layout):
    """Parameters that are divided by rows."""

    def shards(self, rank: int, world_size: int) -> list[tuple[Range, ...]]:
        """Return the ranges of each shard that a rank holds, its own shard first."""
        return row_shards(rank, world_size, self.starts, self.shapes)


class WeightShard(HeldShard):
    """One shard's weights and optimizer state."""

    def weights_of(self, part: Slice) -> torch.Tensor:
        """Return the weights of one of ``parts``."""
        return self._weights[self.parts.index(part)]

    def vectors_of(self, part: Slice) -> Mapping[str, Any]:
        """Return everything of one of ``parts`` that other ranks may receive."""
        return {**self.state_of(part), WEIGHTS: self.weights_of(part)}

    def adopt(self, forms: Mapping[int, Form], vectors: Mapping[tuple[int, str], Any]) -> None:
        """Set the optimizer's state, see ``HeldShard``; the weights have been given before."""
        states = {}
        for index, form in forms.items():
            rest = tuple(vector for vector in form.vectors if vector[0] != WEIGHTS)
            if rest or form.scalars:
                states[index] = Form(vectors=rest, scalars=form.scalars)
        super().adopt(states, vectors)

    def move(self, part: Slice, weights: torch.Tensor) -> None:
        """Keep the weights of a part in other memory, which has the same values."""
        number = self.parts.index(part)
        before, self._weights[number] = self._weights[number], weights
        for group in self.optimizer.param_groups:
            group["params"] = [weights if p is before else p for p in group["params"]]
        if (state := self.optimizer.state.pop(before, None)) is not None:
            self.optimizer.state[weights] = state


class FullShards(ShardedOptimizer):
    """The shards of a rank, and the model that FSDP2 wraps around them.

    Raises:
        WorkloadError: If the optimizer or the model cannot be divided.
    """

    mode = "full"
    is_full = True
    held: list[WeightShard]  # type: ignore[assignment]

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        # It uses private functions, which another version of torch may not have. Jobs without
        # ``shard: full`` must not depend on them.
        from etrain_jupyter.trainer.sharding.fsdp_wrap import WrappedModel

        _check_model(optimizer, model)
        self._wrapper = WrappedModel
        self._module: nn.Module | None = None
        """The module to wrap, in a generation of several ranks."""
        self._wrapped: WrappedModel | None = None
        self._gradients: list[dict[int, torch.Tensor]] = []
        """Gradients of an update, for each of ``held``, by parameter."""
        self._moves: dict[tuple[int, ...], list[Move]] = {}
        super().__init__(optimizer, model)

    def _make_layout(self, named: Sequence[tuple[str, nn.Parameter]]) -> Layout:
        return RowLayout(named)

    def _make_shard(self, spans: Sequence[Range], new: NewShard | None = None) -> HeldShard:
        weights = None
        if new is not None:
            weights = [new.vectors[part.param, WEIGHTS] for part in new.parts]
        return WeightShard(self.layout, spans, self._optimizer, weights)

    # --- the parameters' memory ---

    def release(self) -> None:
        """Empty the model's parameters: the shards have the weights."""
        for parameter in self.layout.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def allocate(self) -> None:
        """Give the model's parameters memory if they are empty; the caller fills it."""
        for parameter, shape in zip(self.layout.parameters, self.layout.shapes, strict=True):
            if parameter.shape != shape:
                parameter.data = torch.empty(shape, dtype=parameter.dtype)

    def settle(self, rank: int, world_size: int) -> None:
        """All ranks hold their shards of ``world_size``: drop the old ones."""
        super().settle(rank, world_size)
        self._moves = {}
        if world_size > 1:
            self.release()
            return
        self.allocate()  # for parameters without elements
        [whole] = self.held
        for part in whole.parts:
            shape = self.layout.shapes[part.param]
            self.layout.parameters[part.param].data = whole.weights_of(part).view(shape)

    def complete_forms(self, forms: Mapping[int, Form]) -> Mapping[int, Form]:
        """Return the forms of all that a shard consists of, from those of the optimizer's state."""
        found = {}
        for index, parameter in enumerate(self.layout.parameters):
            form = forms.get(index, Form(vectors=(), scalars={}))
            vectors = sorted([*form.vectors, (WEIGHTS, parameter.dtype)])
            found[index] = Form(vectors=tuple(vectors), scalars=form.scalars)
        return found

    def take_weights(self, group: RankGroup, new: Sequence[NewShard]) -> None:
        """After a restore: receive the weights of new shards from rank 0, which has all of them.

        Raises:
            CommunicationError: A peer is lost.
        """
        size = group.world_size
        wanted = {rank: self.layout.spans(rank, size) for rank in range(1, size)}
        slots = {part: s.vectors[part.param, WEIGHTS] for s in new for part in s.parts}
        if group.rank == 0:
            for part, slot in slots.items():
                slot.copy_(self.layout.weights(part))
        moves = plan_moves({0: ((0, self.layout.size),)}, wanted)

        def find(span: Range) -> list[torch.Tensor]:
            # Rank 0 has everything in one range, so a move is a whole range of its target.
            return [slots[part] for part in self.layout.slices(span)]

        if moves:
            exchange_moves(group, moves, self._parameters_in, find)

    def _parameters_in(self, span: Range) -> list[torch.Tensor]:
        return [self.layout.weights(part) for part in self.layout.slices(span)]

    @property
    def num_weight_bytes(self) -> int:
        """Memory of the weights that this rank holds outside of a pass, in bytes."""
        shards = (shard.weights_of(part) for shard in self.held for part in shard.parts)
        return sum(weights.nbytes for weights in shards)

    @property
    def num_gradient_bytes(self) -> int:
        """Memory of the gradients between ``prepare`` and the update, in bytes."""
        return sum(g.nbytes for gradients in self._gradients for g in gradients.values())

    # --- one generation ---

    def begin(self, group: RankGroup) -> None:
        """Lay the own shard out as FSDP2 needs it: with room for the rows of the largest shard."""
        if group.world_size == 1:
            return
        own = self.held[0]
        for part in own.parts:
            weights = own.weights_of(part)
            room = self._room(part.param)
            if room > weights.numel():
                padded = weights.new_zeros(room)
                padded[: weights.numel()] = weights
                own.move(part, padded[: weights.numel()])

    def _room(self, index: int) -> int:
        shape = self.layout.shapes[index]
        return padded_rows(shape[0], self.world_size) * shape[1:].numel()

    def wrap(self, module: nn.Module, group: RankGroup, watch: Stopwatch) -> None:
        """Wrap the module in FSDP2, until ``unwrap``."""
        rooms = [self._room(index) for index in range(len(self.layout.shapes))]
        own = {part.param: self.held[0].weights_of(part) for part in self.held[0].parts}
        memory = [
            # Within the memory that ``begin`` has made.
            own[index].as_strided((room,), (1,)) if index in own else parameter.new_zeros(room)
            for index, (room, parameter) in enumerate(
                zip(rooms, self.layout.parameters, strict=True)
            )
        ]
        self._module = module
        self._wrapped = self._wrapper(
            module, group, watch, self.layout.parameters, self.layout.shapes, memory
        )
        self._watch = watch

    def unwrap(self) -> None:
        """Remove FSDP2 from the model, also after a failed pass."""
        wrapped, self._wrapped, self._module = self._wrapped, None, None
        if wrapped is not None:
            wrapped.unwrap()

    def leave(self) -> None:
        """End the generation."""
        self.unwrap()
        super().leave()

    @contextlib.contextmanager
    def whole(self, group: RankGroup, *, ranks: Collection[int] | None = None) -> Iterator[None]:
        """Let the model have all of its weights, unwrapped; see ``ShardedOptimizer``."""
        if self.world_size == 1:
            yield
            return
        module = self._module
        self.unwrap()
        try:
            self._collect(group, tuple(range(group.world_size) if ranks is None else ranks))
            yield
        finally:
            self.release()
        # Not after an exception, which ends the generation.
        if module is not None:
            self.wrap(module, group, self._watch)

    def _collect(self, group: RankGroup, ranks: tuple[int, ...]) -> None:
        size, everything = group.world_size, ((0, self.layout.size),)
        if ranks not in self._moves:
            held = {rank: self.layout.spans(rank, size) for rank in range(size)}
            self._moves[ranks] = plan_moves(held, dict.fromkeys(ranks, everything))
        if group.rank in ranks:
            self.allocate()
            for shard in self.held:
                for part in shard.parts:
                    self.layout.weights(part).copy_(shard.weights_of(part))
        forms = self.complete_forms({})
        exchange_moves(
            group,
            self._moves[ranks],
            lambda span: self.read_span(span, forms),
            self._parameters_in,
        )

    # --- one step ---

    def prepare(self, group: RankGroup, max_norm: float | None) -> None:
        """Clip this rank's gradients, and exchange them so that two ranks can make each update.

        Raises:
            CommunicationError: A peer is lost.
            WorkloadError: A parameter got no gradient.
        """
        if self._wrapped is None:
            super().prepare(group, max_norm)
            return
        found = self._wrapped.gradients()
        own: dict[int, torch.Tensor] = {}
        for part in self.held[0].parts:
            gradient = found[part.param]
            if gradient is None:
                raise WorkloadError(
                    f"{self.layout.names[part.param]} got no gradient in this step, but shard: "
                    "full needs one for each trained parameter. Freeze it with "
                    "requires_grad_(False), or write shard: optimizer."
                )
            own[part.param] = gradient
        if max_norm is not None:
            self._clip(group, list(own.values()), max_norm)
        copies = {
            part.param: torch.empty_like(self.held[1].weights_of(part))
            for part in self.held[1].parts
        }
        size = group.world_size
        sends = {(group.rank + 1) % size: list(own.values())}
        receives = {(group.rank - 1) % size: list(copies.values())}
        RangeExchange(group, sends, receives).start().wait()
        self._gradients = [own, copies]

    def _clip(self, group: RankGroup, gradients: list[torch.Tensor], max_norm: float) -> None:
        squares = torch.zeros(1, dtype=torch.float64)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient).double().square()
        group.all_reduce(squares).wait()
        # As ``clip_grad_norm_``.
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()
        for gradient in gradients:
            gradient.mul_(factor)

    def forget_gradients(self) -> None:
        """Free the gradients that are not in the parameters."""
        self._gradients = []
        if self._wrapped is not None:
            self._wrapped.forget_gradients()

    def step(self, closure: object = None) -> None:
        """Update both shards: nothing is sent, because ``prepare`` has sent the gradients."""
        if self.world_size == 1:
            self.held[0].step()
            return
        for shard, gradients in zip(self.held, self._gradients, strict=True):
            shard.step(lambda part, gradients=gradients: gradients[part.param])  # type: ignore[misc]


def _check_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for key, name in trained.items():
        if key not in updated:
            raise WorkloadError(
                f"shard: full needs all trained parameters in the optimizer, but {name} is not. "
                "Add it, freeze it with requires_grad_(False), or write shard: optimizer."
            )
    for name, parameter in model.named_parameters():
        if id(parameter) in updated and id(parameter) not in trained:
            raise WorkloadError(
                f"shard: full cannot be used with a frozen parameter in the optimizer ({name}). "
                "Give the optimizer trained parameters only, or write shard: optimizer."
            )
        if parameter.device.type != "cpu":
            raise WorkloadError(
                f"shard: full is an experiment on CPUs, but {name} is on {parameter.device}. "
                "Write shard: optimizer."
            )
        if parameter.requires_grad and not parameter.ndim:
            raise WorkloadError(
                f"shard: full divides weights by rows, but {name} is a scalar. Give it the shape "
                "(1,), or write shard: optimizer."
            )
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if kinds != {torch.float32}:
        found = ", ".join(sorted(str(kind) for kind in kinds))
        raise WorkloadError(
            f"shard: full needs float32 weights, but the model has {found}. Convert it with "
            ".float(), or write shard: optimizer."
        )
