"""Mixed precision: autocast to bf16 or fp16, and the loss scale that fp16 needs.

Weights, gradients, their sums over the ranks and the optimizer state remain in float32. Small
gradients would underflow in fp16, so the loss is scaled up before the backward pass and the
gradients are scaled down before the update (Micikevicius et al., "Mixed Precision Training", ICLR
2018). If the scale is too large, gradients become infinite. The sums propagate the infinities to
all ranks, so all ranks skip the update and halve the scale. The scale is part of the state in
checkpoints and state transfers.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping

import torch

from etrain_jupyter.trainer.feature import Step, StepFeature
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.capture import Stateful

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HAS_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'")


class Precision(StepFeature):
    """The precision of one trainer's computations.

    Args:
        name: ``fp32``, ``bf16`` or ``fp16``.
    """

    def __init__(self, name: str = "fp32", device: torch.device | str = "cpu") -> None:
        self._name = name
        self._dtype = _DTYPES.get(name)
        self._device_type = torch.device(device).type
        self._scaler = torch.amp.GradScaler(self._device_type) if name == "fp16" else None
        self.is_scaled = self._scaler is not None
        """True if the loss is scaled."""
        self.autocast: Callable[[], contextlib.AbstractContextManager[object]] = (
            contextlib.nullcontext
            if self._dtype is None
            else functools.partial(torch.autocast, self._device_type, dtype=self._dtype)
        )
        """Returns the context of a forward pass and its loss."""

    @property
    def extras(self) -> Mapping[str, Stateful]:
        """Return the stateful components to checkpoint: the scaler, if there is one."""
        return {} if self._scaler is None else {"scaler": self._scaler}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add the config key to torch's error about an operation not supported on this device.

        Raises:
            WorkloadError: If torch has no kernel for this precision on this device.
        """
        try:
            yield
        except RuntimeError as exc:
            if self._dtype is None or _HAS_NO_KERNEL.search(str(exc)) is None:
                raise
            raise WorkloadError(
                f"precision: {self._name} cannot be computed on the {self._device_type} here: "
                f"{exc}. Nothing was trained; write precision: "
                f"{'bf16, or ' if self._name == 'fp16' else ''}fp32."
            ) from exc

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to differentiate, multiplied by the loss scale."""
        if self._scaler is None:
            return loss
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def before_update(self, step: Step) -> None:
        """Divide the summed gradients by the loss scale, before they are clipped or applied."""
        if self._scaler is not None and step.is_updated:
            self._scaler.unscale_(step.optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights; return False if the gradients were not finite and nothing changed."""
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        # The scaler does not report a skipped update, but it lowers the scale only in that case.
        return self._scaler.get_scale() >= before

    def undo(self, step: Step) -> None:
        """Reset the scaler after a step that is undone; keep the loss scale."""
        # Normally, ``update`` resets the scaler. Without a reset, the scaler refuses to unscale
        # again.
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1.0 if there is none."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())
