"""Exponential moving average of the weights, for ``ema``.

After each update, each averaged tensor moves towards the current one: ``average += (1 - decay) *
(weights - average)``. The average depends only on the weights, so every rank computes the same one
without communication. The average is part of the state, so it is saved in checkpoints and sent to
new ranks. ``load_into`` and ``export`` read it from a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.trainer.feature import StepFeature
from etrain_jupyter.trainer.state.packing import StateError, Tensors, unpack
from etrain_jupyter.trainer.state.parts import AVERAGE, EXTRA_PART, MODEL_PART, header_of
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers


class WeightAverage(StepFeature):
    """The average of a model's trainable parameters and running statistics.

    A parameter that is frozen when the job starts does not change, so it has no average. Running
    statistics are averaged, too, because they must fit the averaged weights; integer buffers keep
    their current values.

    Args:
        decay: Weight of the previous average, in (0, 1).
        has_warmup: Use at most ``(1 + n) / (10 + n)`` after ``n`` updates, so that the initial
            weights do not dominate the average of a short job.
    """

    def __init__(self, model: nn.Module, *, decay: float, has_warmup: bool) -> None:
        self._decay = decay
        self._has_warmup = has_warmup
        self._num_updates = 0
        self._model = model
        self._living: list[torch.Tensor] = []
        self._averages: list[torch.Tensor] = []
        self._index: dict[str, int] = {}
        """Index of each tensor by its name; tied weights have several names."""
        named = model.named_parameters(remove_duplicate=False)
        self._follow({name: p for name, p in named if p.requires_grad})

    def follow_buffers(self, moving: RunningBuffers) -> None:
        """Average the running buffers, too; called after the warm-up, which finds them."""
        found = {id(buffer) for buffer in moving}
        named = self._model.named_buffers(remove_duplicate=False)
        self._follow(
            {name: b for name, b in named if id(b) in found and b.is_floating_point()},
        )

    def _follow(self, named: Tensors) -> None:
        places = {id(tensor): place for place, tensor in enumerate(self._living)}
        for name, tensor in named.items():
            if id(tensor) not in places:
                places[id(tensor)] = len(self._living)
                self._living.append(tensor)
                # In bf16 or fp16, adding a thousandth of a difference would change nothing.
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                self._averages.append(tensor.detach().to(dtype, copy=True))
            self._index[name] = places[id(tensor)]

    @property
    def tensors(self) -> Tensors:
        """The averages by the names of their weights; tied weights share a tensor."""
        return {name: self._averages[place] for name, place in self._index.items()}

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the averages towards the current weights."""
        count = self._num_updates
        decay = min(self._decay, (1 + count) / (10 + count)) if self._has_warmup else self._decay
        step = 1.0 - decay
        for average, now in zip(self._averages, self._living, strict=True):
            if now.is_cuda and now.dtype == average.dtype:
                average.lerp_(now, step)
                continue
            # Each operation rounds once. A fused kernel may round the end of a tensor differently,
            # depending on the number of threads, and then ranks would differ.
            average.add_((now.to(average.dtype) - average).mul_(step))
        self._num_updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights with their averages within the context."""
        # Copy values instead of exchanging pointers, because DDP, compiled code and fused RNN
        # weights refer to the memory of the parameters. The copies need as much memory as the
        # gradients, which do not exist now.
        with torch.no_grad():
            copies = [now.detach().clone() for now in self._living]
            try:
                for now, average in zip(self._living, self._averages, strict=True):
                    now.copy_(average)
                yield
            finally:
                for now, copy in zip(self._living, copies, strict=True):
                    now.copy_(copy)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from the current weights, which come from a state without an average."""
        for average, now in zip(self._averages, self._living, strict=True):
            average.copy_(now)
        self._num_updates = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name and the number of updates."""
        return {"num_updates": self._num_updates, "average": self.tensors}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state that ``state_dict`` has returned.

        Raises:
            StateError: If it contains the averages of other tensors.
        """
        given: Tensors = state_dict["average"]
        mine = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        theirs = {name: list(tensor.shape) for name, tensor in given.items()}
        if mine != theirs:
            names = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
            raise StateError(
                f"the averaged weights differ from this model's in {', '.join(names[:3])}. Build "
                "the same model, with the same frozen parameters, on every worker"
            )
        for name, place in self._index.items():
            self._averages[place].copy_(given[name])
        self._num_updates = int(state_dict["num_updates"])


@torch.no_grad()
def load_averaged_state(files: Mapping[str, Path]) -> Tensors:
    """Return a checkpoint's weights by name, averaged where there is an average.

    ``model.safetensors`` contains the weights that are trained; their averages are in the file of
    the other components. Reading them never runs code from the files.

    Raises:
        CheckpointError: If the averages do not fit the weights.
    """
    state = load_file(files[MODEL_PART])
    extra = load_file(files[EXTRA_PART])
    try:
        packed = header_of(dict(files))["extras"][AVERAGE]
        averages: Tensors = unpack(packed, extra.__getitem__)["average"]
        unfit = [name for name, value in averages.items() if state[name].shape != value.shape]
    except (KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"its averaged weights do not fit its weights ({exc!r})") from exc
    if unfit:
        raise CheckpointError(f"its averaged weights differ in shape: {', '.join(unfit[:3])}")
    for name, value in averages.items():
        state[name].copy_(value)  # in the type of the weights
    return state


def write_averaged_file(files: Mapping[str, Path], target: Path) -> None:
    """Write the averaged weights as a safetensors file."""
    save_file(load_averaged_state(files), target, metadata={"format": "pt"})
