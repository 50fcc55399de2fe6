"""Compile the model with torch.compile, for ``compile: true``.

The model is compiled in place, so names, hooks, DDP and checkpoints still see the notebook's model.
All compilation happens in the warm-up, while no other rank waits. Afterwards, nothing is compiled,
and an unexpected shape or branch runs eagerly. A compilation in the middle of a step would stall
all ranks, and this rank would appear to be hung.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config

BACKEND: Any = "inductor"
"""Backend of torch.compile."""

BEAT_S = 1.0
"""Interval of the heartbeats during a compilation."""
COMPILE_TIMEOUT_S = 600.0
"""Heartbeats stop after this time; the rank is then reported as hung, with its stack."""

MAX_REASON = 300
"""Maximum length of a compiler error in the log."""


def compile_in_place(model: nn.Module) -> None:
    """Route every call to ``model`` through torch.compile, which compiles on first use."""
    # Compile in this process, because a pool of compiler processes would outlive a killed trainer.
    inductor_config.compile_threads = 1
    torch.compiler.set_stance("default")
    model.compile(backend=BACKEND)


def freeze_compiled() -> None:
    """Stop compiling in this process; code that is not compiled yet runs eagerly."""
    torch.compiler.set_stance("eager_on_recompile")


@contextlib.contextmanager
def heartbeats(beat: Callable[[], None]) -> Iterator[None]:
    """Send heartbeats from a thread while the main thread is in a long torch call."""
    # A compilation may take minutes, during which no pass sends a heartbeat. The time limit ensures
    # that a hung compiler is detected.
    is_over = threading.Event()
    until = time.monotonic() + COMPILE_TIMEOUT_S

    def keep_beating() -> None:
        while not is_over.wait(BEAT_S) and time.monotonic() < until:
            beat()

    thread = threading.Thread(target=keep_beating, name="etrain-compile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def undo_compile(model: nn.Module) -> None:
    """Run ``model`` eagerly again."""
    model._compiled_call_impl = None  # set by nn.Module.compile, which has no inverse
    torch._dynamo.reset()


def mark_batch(batch: Any, count: int) -> None:
    """Mark a batch's first dimension as dynamic, so that one compilation serves all batch sizes."""
    for tensor in _tensors_in(batch):
        if tensor.ndim and tensor.shape[0] == count:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _tensors_in(batch: Any) -> Iterable[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors_in(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors_in(value)


def reason_of(exc: BaseException) -> str:
    """Return the error as a single line."""
    # The first line may contain only the name of the backend; the second line has the error.
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()][:2]
    text = f"{type(exc).__name__}: {' '.join(lines)}".rstrip(": ")
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]} ..."
