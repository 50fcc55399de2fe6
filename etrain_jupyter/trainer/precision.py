"""Numbers of the forward pass: bf16 and fp16 by autocast, and the loss scale that fp16 needs.

Weights, gradients, their sums over the ranks and the optimizer stay in float32. Small gradients
would vanish in fp16, so the loss is scaled up before the backward pass and the gradients down
before the update (Micikevicius et al., "Mixed Precision Training", ICLR 2018). A scale that was too
large shows as infinities. They go through the sums, so that all ranks see them, skip the update
alike and halve the scale: its state is part of what newcomers and checkpoints get.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import torch

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.capture import Stateful

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HAS_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'")


class Precision:
    """How one trainer computes.

    Args:
        name: ``fp32``, ``bf16`` or ``fp16``.
        device: Where the model is.
    """

    def __init__(self, name: str = "fp32", device: torch.device | str = "cpu") -> None:
        self._name = name
        self._dtype = _DTYPES.get(name)
        self._device_type = torch.device(device).type
        self._scaler = torch.amp.GradScaler(self._device_type) if name == "fp16" else None

    @property
    def extras(self) -> Mapping[str, Stateful]:
        """Return what has a state: the scaler, if there is one."""
        return {} if self._scaler is None else {"scaler": self._scaler}

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a forward pass and its loss."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say of torch's error which key of the cell asked for what this device cannot do.

        Raises:
            WorkloadError: If torch has no kernel for these numbers here.
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
        """Return what to differentiate."""
        if self._scaler is None:
            return loss
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the summed gradients back to size, before anything looks at them."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights; return False if the gradients were not finite and nothing changed."""
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= before

    def undo(self) -> None:
        """Forget that the gradients of an undone step were unscaled; the loss scale stays.

        Else the scaler, which is reset by its ``update`` alone, refuses to unscale the next step.
        """
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    @property
    def loss_scale(self) -> float:
        """The present scale; 1.0 without one."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())
