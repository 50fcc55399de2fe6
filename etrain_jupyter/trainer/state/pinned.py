"""Pin host memory of an exact size, so that copies from a GPU are asynchronous.

torch's own pinned allocator rounds each block up to a power of two and keeps freed blocks: the copy
of a state of 9 GB would hold 16 GB, and a copy with another layout would add its own blocks.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

logger = logging.getLogger(__name__)


def pin(buffer: torch.Tensor, *, owner: object) -> bool:
    """Register the memory of ``buffer`` with CUDA, until ``owner`` is freed.

    Args:
        buffer: A tensor in host memory, shape ``(B,)``.
        owner: An object that holds the only lasting reference to ``buffer``.

    Returns:
        True if the memory is pinned. If not, for example because the user's limit for locked memory
        is reached, copies still work, but are synchronous.
    """
    if buffer.numel() == 0:
        return False
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    start = buffer.data_ptr()
    error = cuda.cudaHostRegister(start, buffer.nbytes, 0)
    if int(error) != 0:
        logger.warning(
            "cannot pin %d bytes of host memory (CUDA error %d): checkpoints stall training "
            "longer. Raise the limit of locked memory (ulimit -l).",
            buffer.nbytes,
            int(error),
        )
        return False
    # The finalizer runs before the attributes of ``owner`` are freed, and not at exit: the process
    # then has no CUDA context.
    weakref.finalize(owner, cuda.cudaHostUnregister, start).atexit = False
    return True
