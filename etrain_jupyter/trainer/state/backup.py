"""Backup of a rank's state in memory, for steps that are undone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from etrain_jupyter.trainer.control.device_errors import device_error_in
from etrain_jupyter.trainer.seeds import seeded
from etrain_jupyter.trainer.state.capture import put_state, take_state
from etrain_jupyter.trainer.workload import Workload


def num_state_bytes(workload: Workload) -> int:
    """Return the memory that a backup of the state needs."""
    _, tensors = take_state(workload.model, workload.optimizer, workload.extras)
    return sum(tensor.nbytes for tensor in tensors.values())


@contextlib.contextmanager
def restored(workload: Workload, mark_torn: Callable[[bool], None]) -> Iterator[None]:
    """Restore weights, buffers, optimizer, other components and RNG states after the context.

    This includes a context that raises, except after a CUDA error, when every copy would raise.

    Args:
        workload: The objects to restore.
        mark_torn: Called with True before the state is restored, and with False afterwards.
    """
    header, tensors = take_state(workload.model, workload.optimizer, workload.extras)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with seeded(0), torch.random.fork_rng():
        try:
            yield
        except BaseException as exc:
            if device_error_in(exc) is None:
                mark_torn(True)
                _restore(workload, header, copies)
                mark_torn(False)
            raise
        mark_torn(True)
        _restore(workload, header, copies)
        mark_torn(False)


def _restore(
    workload: Workload, header: dict[str, object], copies: dict[str, torch.Tensor]
) -> None:
    workload.optimizer.zero_grad(set_to_none=True)
    workload.model.zero_grad(set_to_none=True)
    put_state(workload.model, workload.optimizer, header, copies, workload.extras)
    workload.precision.undo()
