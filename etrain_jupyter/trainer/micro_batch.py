"""Micro-batch size of this rank, for ``batch.micro``.

In the warm-up, ``auto`` finds the largest size that fits; it halves the size when memory runs out
later. Each rank has its own size, and splits its share of a step into as many passes as necessary,
and the ranks exchange one sum after the last pass.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch

from etrain_jupyter.config.schema import BatchConfig, TrainConfig
from etrain_jupyter.rules.samples.batch_plan import plan_step
from etrain_jupyter.trainer.references import WorkloadError

OUT_OF_MEMORY = "out of memory"
"""Failure of a generation in which a rank ran out of device memory."""

NUM_REFINEMENTS = 3
"""Number of bisection steps between the largest size known to fit and the smallest that does
not."""

MARGIN = 0.05
"""Fraction of a GPU's memory that a trial leaves free, for connections and kernels."""

STATE_TENSORS = 2
"""Number of state tensors per weight to assume (as for Adam) if an optimizer's state cannot be
measured."""


class MicroBatch:
    """The size of this rank's micro-batches.

    Args:
        most: Number of samples in the largest pass that this rank can ever run (``largest_pass``).
    """

    def __init__(self, batch: BatchConfig, most: int) -> None:
        size = batch.micro_batch_size
        self.is_auto = size == "auto"
        self.most = most
        self.size: int | None = most if size == "auto" else size
        """Maximum number of samples per pass; None for no limit."""
        self._has_shrunk = False

    def find(self, fits: Callable[[int], bool], describe: Callable[[], str]) -> int:
        """Find the size by trial; return the number of trials.

        Raises:
            WorkloadError: If not even one sample fits.
        """
        tries: list[int] = []

        def counted(size: int) -> bool:
            tries.append(size)
            return fits(size)

        self.size = largest_fit(counted, self.most)
        if not self.size:
            raise does_not_fit(describe())
        return len(tries)

    def shrink(self, exc: BaseException) -> bool:
        """Halve the size after an out-of-memory error; return True if it was halved."""
        # Later passes may need more memory than the trial, for example for longer texts, or if
        # another process uses the GPU. The number of retries is limited, because the size cannot go
        # below one sample.
        if not self.is_auto or not is_out_of_memory(exc) or self.size in (None, 1):
            return False
        assert self.size is not None
        self.size = max(1, self.size // 2)
        self._has_shrunk = True
        return True

    def limit_to(self, earlier: MicroBatch) -> None:
        """Start at the size to which an ``earlier`` instance in this process was reduced."""
        if self.is_auto and earlier.size is not None:
            self.size = self.most = min(self.most, earlier.size)

    def free_failed_pass(self) -> None:
        """Free the memory of a pass that failed, once nothing refers to its exception."""
        if self._has_shrunk:
            self._has_shrunk = False
            free_memory()


def largest_pass(batch: BatchConfig, num_samples: int) -> int:
    """Return the number of samples in the largest pass of a job that has a single rank."""
    # Assume a single rank, whatever the current number, because the job may shrink to one rank
    # later.
    count = min(batch.size(1), num_samples)
    plan = plan_step(
        count=count,
        world_size=1,
        micro_batch_size=None,
        min_share=min(2, count),
        num_passes=batch.aggregation_frequency,
    )
    return -(-count // plan.num_micro_steps)


def largest_fit(fits: Callable[[int], bool], most: int) -> int:
    """Return a size up to ``most`` that fits; 0 if not even one sample fits.

    Halve ``most`` until it fits, in at most ``log2(most) + 1`` trials. Then bisect the gap to the
    smallest size that did not fit, in at most ``NUM_REFINEMENTS`` trials. The result is at least
    8/9 of the largest size that fits, because each bisection halves a gap of at most the size
    itself.

    >>> largest_fit(lambda size: size <= 100, 256)
    96
    """
    size, too_large = most, 0
    # Phase 1: halve until it fits.
    while size and not fits(size):
        size, too_large = size // 2, size
    # Phase 2: bisect between the largest size that fits and the smallest that does not.
    for _ in range(NUM_REFINEMENTS):
        middle = (size + too_large) // 2
        if not size or middle <= size:
            break
        if fits(middle):
            size = middle
        else:
            too_large = middle
    return size


# --- memory ---


def is_out_of_memory(exc: BaseException) -> bool:
    """Return True if torch reports that device or host memory ran out."""
    if isinstance(exc, torch.OutOfMemoryError):
        return True
    # CUDA allocations that bypass torch's allocator, and CPU allocations, raise RuntimeError.
    if isinstance(exc, RuntimeError) and "CUDA error: out of memory" in str(exc):
        return True
    is_cpu = isinstance(exc, RuntimeError) and "DefaultCPUAllocator" in str(exc)
    return is_cpu and any(text in str(exc) for text in ("allocate memory", "enough memory"))


def out_of_memory_in(exc: BaseException) -> BaseException | None:
    """Return the out-of-memory error that led to an exception; None if there is none."""
    for link in (exc, exc.__cause__):
        if link is not None and (isinstance(link, MemoryError) or is_out_of_memory(link)):
            return link
    return None


def hint_for_memory(config: TrainConfig) -> str:
    """Return the remedy for an out-of-memory error that a smaller micro-batch cannot fix."""
    if config.batch.micro_batch_size == "auto":
        return "not even one sample fits: use a smaller model, or workers with more memory"
    # With ``auto``, ranks would have different sizes, and so different sums.
    if config.reproducible is not None:
        return "write batch: {micro: N}, with an N that fits on the smallest worker"
    return "write batch: {micro: auto}, which finds the largest micro-batch that fits"


def does_not_fit(figures: str) -> WorkloadError:
    """Return the error for a model that does not fit even with a single sample."""
    return WorkloadError(
        f"batch.micro: auto: not even one sample fits into memory ({figures}). Use a smaller "
        "model or shorter samples, precision: bf16, or workers with more memory."
    )


def free_memory() -> None:
    """Free unused memory, including tensors kept alive only by a reference cycle."""
    # An exception and its frames form such cycles.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class DeviceMemory(NamedTuple):
    """Memory of a device, in bytes."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{in_gib(self.free)} of {in_gib(self.total)} free"


def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of a device; the free part is shared with other processes."""
    if device.type == "cuda":
        return DeviceMemory(*torch.cuda.mem_get_info(device))
    found = psutil.virtual_memory()
    return DeviceMemory(found.available, found.total)


def in_gib(num_bytes: int) -> str:
    """Return a size as text, in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"


class Reserve:
    """Memory that training needs but a trial pass does not.

    It consists of the optimizer's state, which the first step allocates; the buckets into which DDP
    copies the gradients; and, on a GPU, a margin.

    Args:
        optimizer: The job's optimizer.
        device: The device of the model.
        state_share: Share of the optimizer's state that this rank will hold.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, *, state_share: float = 1.0
    ) -> None:
        self._device = device
        self._sizes = [math.ceil(size * state_share) for size in _state_sizes(optimizer)]
        self._sizes += [_size_of(p) for p in _parameters_of(optimizer) if p.requires_grad]
        if device.type == "cuda":
            self._sizes.append(int(MARGIN * memory_of(device).total))

    @property
    def num_bytes(self) -> int:
        """Size of the reserve."""
        return sum(self._sizes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Allocate the reserve in blocks as large as the real tensors, to model fragmentation."""
        blocks = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in self._sizes]
        try:
            yield
        finally:
            blocks.clear()


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    # Returns sizes in bytes. A copy of the optimizer takes a step on tiny parameters, one per real
    # parameter. A state tensor that is as large as the tiny parameter will be as large as the real
    # parameter. A step on the real parameters would itself need the memory that is being measured.
    parameters = [p for p in _parameters_of(optimizer) if p.requires_grad]
    tiny = [torch.zeros([min(2, n) for n in p.shape]).to(p) for p in parameters]
    try:
        # In the copy, every reference to a parameter points to its tiny stand-in.
        twin = copy.deepcopy(optimizer, {id(p): t for p, t in zip(parameters, tiny, strict=True)})
        for stand_in in tiny:
            stand_in.grad = torch.ones_like(stand_in)
        twin.step()
    except Exception:  # the notebook's own optimizer may raise any exception
        return [_size_of(p) for p in parameters for _ in range(STATE_TENSORS)]
    return [
        p.numel() * value.element_size()
        for p, stand_in in zip(parameters, tiny, strict=True)
        for value in twin.state.get(stand_in, {}).values()
        if isinstance(value, torch.Tensor) and value.shape == stand_in.shape and value.ndim
    ]
