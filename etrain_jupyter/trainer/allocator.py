"""Settings of glibc's allocator for training steps, which repeat the same allocations."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD = 256 << 20
"""Free memory at the end of the heap that is kept, in bytes."""
MMAP_THRESHOLD = 32 << 20
"""Size from which a block is always returned when it is freed, in bytes; the maximum of glibc."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NAMES = ("trim_threshold", "mmap_threshold")


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of returning it to the kernel.

    By default, glibc returns the free end of the heap when it is twice as large as the largest
    block freed so far, and always from 64 MiB. A step frees its activations and gradients, and the
    next step gets the same memory back page by page, each filled with zeros by the kernel::

        default   step: page faults ── free: returned ── step: page faults ── free: returned
        kept      step: page faults ── free: kept ────── step ─────────────── free: kept

    Returns:
        False if the allocator is not glibc's, or the user has set one of its thresholds.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{n.upper()}_" in os.environ or f"malloc.{n}" in tunables for n in _NAMES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting one threshold ends glibc's own adjustment of the other, so both are set.
    return bool(
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    )
