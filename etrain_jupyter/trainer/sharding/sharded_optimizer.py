"""An optimizer in shards: each rank updates its own shard and a copy of the next rank's.

Every rank has all weights and, after the sum over the ranks, all gradients. So a rank can update
any part of the weights by itself, and no optimizer state is sent in a step. Only updated weights
are sent. A rank sends its own shard to all ranks except the previous one, which has updated the
same shard.

Four rules keep both copies equal, no matter when a rank is lost:

1. Only the death of a process interrupts an update: both shards are updated before a failure of the
   group is checked.
2. No rank updates before all ranks have complete gradients (``before_update`` waits for that).
3. So if some rank has updated, every survivor has complete gradients and applies the same update by
   itself while the next generation forms (``shard_sync``). If no survivor has updated, the step is
   undone.
4. A rank's copy of the weights of other shards may be stale, so it is sent again after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from etrain_jupyter.config.vocabulary import ELEMENTWISE
from etrain_jupyter.rules.optimizer_shards import Range
from etrain_jupyter.trainer.feature import Step, StepFeature
from etrain_jupyter.trainer.group.process_group import CommunicationError, Pending, RankGroup
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.sharding.held_state import (
    SCALARS,
    Form,
    HeldShard,
    Layout,
    NewShard,
    vectors_of,
)
from etrain_jupyter.trainer.sharding.range_exchange import RangeExchange
from etrain_jupyter.trainer.state.packing import Tensors


class ShardedOptimizer(StepFeature):
    """The shards that this rank updates.

    The job's optimizer still owns the parameter groups, but has no state of its own. Its ``step``
    updates the shards.

    Args:
        optimizer: The job's optimizer, before its first step.
        model: The model that it updates, for the names of its parameters.

    Raises:
        WorkloadError: If the optimizer or the model cannot be divided.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        _check_optimizer(optimizer)
        names = {id(p): name for name, p in model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named = [(names.get(id(p), "a parameter"), p) for p in parameters]
        self.layout = Layout(named)
        _check_parameters(self.layout)
        self._optimizer = optimizer
        self.world_size = 1
        """Number of ranks among which the state is divided."""
        self.rank = 0
        self.held: list[HeldShard] = []
        """The shards that this rank updates, its own first."""
        self.previous: list[HeldShard] = []
        """The shards of the previous generation, until all ranks have received their new ones."""
        self.is_stale = False
        """True if this rank may have stale weights in the shards that it does not hold."""
        self._spread: RangeExchange | None = None
        self._in_flight: Pending | None = None
        self._initial = self._take_initial()
        self.restart()
        # The gradient scaler and ``StepTrainer`` call the optimizer. The scaler must look for
        # infinite gradients itself, rather than leave it to a fused kernel of the whole optimizer.
        optimizer.step = self.step  # type: ignore[method-assign, assignment]
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def _take_initial(self) -> dict[int, tuple[Form, dict[str, float]]]:
        # Some optimizers create their state in the constructor, with the same value in every
        # element.
        initial = {}
        for index, parameter in enumerate(self.layout.parameters):
            if (state := self._optimizer.state.get(parameter)) and parameter.numel():
                form = Form.of(self.layout.names[index], state)
                initial[index] = form, {k: state[k].view(-1)[0].item() for k, _ in form.vectors}
        self._optimizer.state.clear()
        return initial

    def restart(self) -> None:
        """Reset the state to what it was before the first step."""
        self.drop()
        whole = HeldShard(self.layout, (0, self.layout.size), self._optimizer)
        vectors = {}
        for index, (form, values) in self._initial.items():
            like = self.layout.parameters[index].detach().view(-1)
            for name, dtype in form.vectors:
                vectors[index, name] = torch.full_like(like, values[name], dtype=dtype)
        whole.adopt({index: form for index, (form, _) in self._initial.items()}, vectors)
        self.held = [whole]
        self.rank, self.world_size = 0, 1

    # --- one generation ---

    def connect(self, group: RankGroup) -> None:
        """Prepare the exchange of weights in a generation whose ranks hold their shards."""
        own = {rank: self._weights_of(rank) for rank in range(group.world_size)}
        me, size = group.rank, group.world_size
        # The previous rank already has this rank's shard. If there are only two ranks, each has
        # both shards.
        others = [rank for rank in range(size) if size > 2 and rank != me]
        sends = {rank: own[me] for rank in others if rank != (me - 1) % size}
        receives = {rank: own[rank] for rank in others if rank != (me + 1) % size}
        self._spread = RangeExchange(group, sends, receives) if size > 2 else None

    def leave(self) -> None:
        """End the generation."""
        self._spread = self._in_flight = None

    def _weights_of(self, rank: int) -> list[torch.Tensor]:
        own, *_ = self.layout.shards(rank, self.world_size)
        return [self.layout.weights(part) for part in self.layout.slices(own)]

    # --- one step ---

    def step(self, closure: object = None) -> None:
        """Update both shards, and start to exchange the weights; ``settle`` reports failures."""
        # main thread       update own shard ── update copy ── commit ── wait
        # exchange thread                    └─ send own shard, receive the others ─┘
        own, *copies = self.held
        own.step()
        self.is_stale = self.world_size > 2
        if self._spread is not None:
            try:
                self._in_flight = self._spread.start()
            except CommunicationError:
                self._in_flight = None  # ``settle`` raises; first update the other shard
        for copy in copies:
            copy.step()

    def before_update(self, step: Step) -> None:
        """Wait until all ranks have complete gradients.

        Raises:
            CommunicationError: A peer is lost; the next generation decides whether the update
                counts.
        """
        # No rank updates its shards before all ranks can. Otherwise, a single rank could have
        # updated, and then die, or survive with only two of the updated shards:
        #
        #     rank 0   gradients complete ── agreed ── update
        #     rank 1   gradients complete ── agreed ── update
        #     rank 2   gradients complete ── lost a peer: may update once it knows that rank 0 or
        #              rank 1 has; see ``shard_sync``
        if step.group.world_size == 1:
            return
        step.reach("agree")
        try:
            step.group.all_reduce(torch.zeros(1)).wait()
        except CommunicationError:
            step.is_prepared = True
            raise
        step.reach("agreed")

    def settle(self, step: Step) -> None:
        """Wait for the weights of the other shards; ``is_stale`` remains true until ``finish``."""
        if self.is_stale:
            step.reach("updated")
            self._wait(step.group)

    def _wait(self, group: RankGroup) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.wait()
        elif self.is_stale:
            group.raise_if_failed()

    # --- what is here ---

    @property
    def sources(self) -> list[HeldShard]:
        """All shards whose state this rank has."""
        return [*self.held, *self.previous]

    @property
    def spans(self) -> list[Range]:
        """Ranges of which this rank has the state."""
        return [source.span for source in self.sources]

    def form(self, index: int) -> Form | None:
        """Return the form of a parameter's state; None if this rank has no state for it."""
        return next((f for source in self.sources if (f := source.form(index))), None)

    def drop(self) -> None:
        """Forget all state, because that of another rank or of a checkpoint applies."""
        self.held, self.previous = [], []

    def replace(self, new: Sequence[NewShard]) -> None:
        """Update new shards from now on, but keep the old ones as sources until ``adopt``."""
        self.previous = [*self.held, *self.previous]
        self.held = []
        for shard in new:
            held = HeldShard(self.layout, shard.span, self._optimizer)
            held.adopt(shard.forms, shard.vectors)
            self.held.append(held)

    def adopt(self, rank: int, world_size: int) -> None:
        """Drop the old shards, because all ranks hold their shards for ``world_size`` ranks."""
        self.rank, self.world_size = rank, world_size
        self.previous = []

    @property
    def num_bytes(self) -> int:
        """Memory of the state that this rank holds, in bytes."""
        return sum(shard.num_bytes for shard in (*self.held, *self.previous))

    def read_span(self, span: Range, forms: Mapping[int, Form]) -> list[torch.Tensor]:
        """Return the vectors of a range, in the order in which both sides list them.

        The range must be within one of ``spans``.
        """
        [source, *_] = [
            source
            for source in self.sources
            if source.span[0] <= span[0] and span[1] <= source.span[1]
        ]
        return [
            source.read(name, part)
            for part in self.layout.slices(span)
            for name, _ in vectors_of(part, forms)
        ]

    def own_part(self) -> Tensors:
        """Return the state of this rank's own shard by its names in a checkpoint; not copies."""
        # A parameter that is cut has one entry per shard and vector: INDEX.NAME@FIRST:STOP. Others
        # have the same entries as in a checkpoint of an optimizer that is not divided.
        tensors: Tensors = {}
        own = self.held[0]
        for part in own.parts:
            shape = self.layout.shapes[part.param]
            is_whole = part.stop - part.first == shape.numel()
            for name, value in own.state_of(part).items():
                key = f"{part.param}.{name}"
                if name in SCALARS:
                    if not part.first:
                        tensors[key] = value
                elif is_whole:
                    tensors[key] = value.view(shape)
                else:
                    tensors[f"{key}@{part.first}:{part.stop}"] = value
        return tensors


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    is_known = kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__, None)
    if not is_known:
        raise WorkloadError(
            f"shard: optimizer cannot divide the state of {kind.__name__}: it is possible for "
            f"{', '.join(sorted(ELEMENTWISE))} of torch.optim, which update each element by "
            "itself. Use one of them, or write shard: none."
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise WorkloadError(
            "shard: optimizer does not call step hooks, but the optimizer has some. Remove "
            "register_step_pre_hook and register_step_post_hook, or write shard: none."
        )


def _check_parameters(layout: Layout) -> None:
    for name, parameter in zip(layout.names, layout.parameters, strict=True):
        if not parameter.is_contiguous():
            raise WorkloadError(
                f"shard: optimizer needs contiguous parameters, but {name} is not (for example, "
                "channels_last reorders memory). Remove that conversion, or write shard: none."
            )
