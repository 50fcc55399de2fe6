"""``batch.micro``: the most samples that this rank puts through the model at once.

``auto`` tries what fits, before the rank says hello, and gives way when memory runs out later. The
size is this rank's own affair: its share of a step goes through in as many passes as it takes, and
the ranks exchange one sum after the last.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch

from etrain_jupyter.config.schema import BatchConfig, TrainConfig
from etrain_jupyter.rules.samples.batch_plan import plan_step
from etrain_jupyter.trainer.references import WorkloadError

NUM_REFINEMENTS = 3
"""Tries between the largest size that was seen to fit and the smallest that was seen not to."""

MARGIN = 0.05
"""Part of a GPU's memory that a try leaves free: connections and kernels come later."""

STATE_TENSORS = 2
"""As large as the weights, that an optimizer is taken to keep if it does not let itself be tried:
those of Adam."""


class MicroBatch:
    """The size of this rank's micro batches, and how it changes.

    Args:
        batch: What the cell says.
        most: Samples of the largest pass that this rank can ever make (``largest_pass``).
    """

    def __init__(self, batch: BatchConfig, most: int) -> None:
        asked = batch.micro_batch_size
        self.is_auto = asked == "auto"
        self.most = most
        self.size: int | None = most if asked == "auto" else asked
        """None for no limit."""
        self._has_shrunk = False

    def find(self, fits: Callable[[int], bool], describe: Callable[[], str]) -> int:
        """Find the size by trying; return how many tries it took.

        Args:
            fits: Whether a pass of so many samples fits; see ``largest_fit``.
            describe: Returns the memory figures, for an error.

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

    def give_way(self, exc: BaseException) -> bool:
        """Halve the size if ``exc`` says that memory ran out; return whether it can get smaller.

        Nothing else bounds how often: each time is another half, down to one sample.
        """
        if not self.is_auto or not is_out_of_memory(exc) or self.size in (None, 1):
            return False
        assert self.size is not None
        self.size = max(1, self.size // 2)
        self._has_shrunk = True
        return True

    def never_above(self, earlier: MicroBatch) -> None:
        """Do not try again what gave way to an ``earlier`` one of this process."""
        if self.is_auto and earlier.size is not None:
            self.size = self.most = min(self.most, earlier.size)

    def tidy_up(self) -> None:
        """Free what a pass that gave way has left, once nothing refers to its exception."""
        if self._has_shrunk:
            self._has_shrunk = False
            free_memory()


def largest_pass(batch: BatchConfig, num_samples: int) -> int:
    """Return the samples of the largest pass of a rank that is alone, which has the largest share.

    Args:
        batch: What the cell says.
        num_samples: Of the first step.
    """
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
    """Return a size up to ``most`` that fits; 0 if not even 1 does.

    From ``most`` it is halved until it fits, at most ``log2(most) + 1`` tries. Then at most
    ``NUM_REFINEMENTS`` more halve the gap to the smallest that did not: what is found is at least
    8/9 of what would have fitted.

    >>> largest_fit(lambda size: size <= 100, 256)
    96
    """
    size, too_large = most, 0
    while size and not fits(size):
        size, too_large = size // 2, size
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
    """Return whether a device's memory, or that of the CPU, ran out, as torch says it."""
    if isinstance(exc, torch.OutOfMemoryError):
        return True
    # What CUDA allocates without torch's allocator, and the CPU's, have no class of their own.
    if isinstance(exc, RuntimeError) and "CUDA error: out of memory" in str(exc):
        return True
    is_ours = isinstance(exc, RuntimeError) and "DefaultCPUAllocator" in str(exc)
    return is_ours and any(words in str(exc) for words in ("allocate memory", "enough memory"))


def lack_of_memory_in(exc: BaseException) -> BaseException | None:
    """Return the lack of memory that led to this exception, of the host or a device; else None."""
    for link in (exc, exc.__cause__):
        if link is not None and (isinstance(link, MemoryError) or is_out_of_memory(link)):
            return link
    return None


def hint_for_memory(config: TrainConfig) -> str:
    """Return what to type where memory ran out and nothing could give way."""
    if config.batch.micro_batch_size == "auto":
        return "not even one sample at a time fits: use a smaller model, or workers with more"
    if config.reproducible is not None:
        return "write batch: {micro: N}, with an N that fits on the smallest worker"
    return "write batch: {micro: auto}, which passes as many samples at once as fit"


def does_not_fit(figures: str) -> WorkloadError:
    """Build the error for a model that has no micro batch."""
    return WorkloadError(
        f"batch.micro: auto: not even one sample fits into memory ({figures}). Use a smaller "
        "model or shorter samples, precision: bf16, or workers with more memory."
    )


def free_memory() -> None:
    """Give back what nobody uses any more, also what only a cycle of references holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class DeviceMemory(NamedTuple):
    """What a device has; in bytes."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{in_gib(self.free)} of {in_gib(self.total)} free"


def memory_of(device: torch.device) -> DeviceMemory:
    """Return what is free on a device: for us as well as for others."""
    if device.type == "cuda":
        return DeviceMemory(*torch.cuda.mem_get_info(device))
    found = psutil.virtual_memory()
    return DeviceMemory(found.available, found.total)


def in_gib(num_bytes: int) -> str:
    """Return a size for a person."""
    return f"{num_bytes / 2**30:.2f} GiB"


class Reserve:
    """Room for what is in memory while training but not while trying.

    That is the optimizer's state, which its first step allocates; the buckets in which DDP copies
    the gradients to send them; and a margin on a GPU.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._device = device
        self._sizes = _state_sizes(optimizer)
        self._sizes += [_size_of(p) for p in _parameters_of(optimizer) if p.requires_grad]
        if device.type == "cuda":
            self._sizes.append(int(MARGIN * memory_of(device).total))

    @property
    def num_bytes(self) -> int:
        """How much that is."""
        return sum(self._sizes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it, in pieces as large as the real ones."""
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
    """Return the bytes of each tensor of the state that the optimizer has not got yet.

    A copy of it steps on tiny parameters, one for each real one: what is as large as these there
    will be as large as the weights.
    """
    parameters = [p for p in _parameters_of(optimizer) if p.requires_grad]
    tiny = [torch.zeros([min(2, n) for n in p.shape]).to(p) for p in parameters]
    try:
        # Whatever refers to a parameter refers to its stand-in in the copy.
        twin = copy.deepcopy(optimizer, {id(p): t for p, t in zip(parameters, tiny, strict=True)})
        for stand_in in tiny:
            stand_in.grad = torch.ones_like(stand_in)
        twin.step()
    except Exception:  # the notebook's own optimizer may be anything
        return [_size_of(p) for p in parameters for _ in range(STATE_TENSORS)]
    return [
        p.numel() * value.element_size()
        for p, stand_in in zip(parameters, tiny, strict=True)
        for value in twin.state.get(stand_in, {}).values()
        if isinstance(value, torch.Tensor) and value.shape == stand_in.shape and value.ndim
    ]
