"""``compile: true``: torch.compile of the model in place, done before the rank says hello.

In place, so that names, hooks, DDP and checkpoints see the model that the notebook made. Everything
is compiled while the rank warms up, when nobody waits for it. Afterwards nothing is compiled any
more: a shape or a branch that was not foreseen runs as it is written. A compilation in the middle
of a step would hold up all ranks, and nobody could tell it from a rank that hangs.
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
"""What torch.compile compiles with."""

BEAT_S = 1.0
COMPILE_PATIENCE_S = 600.0
"""How long a compilation counts as alive; after that, people are told what it is doing."""

MAX_REASON = 300
"""Characters of a compiler's complaint that are passed on."""


def compile_in_place(model: nn.Module) -> None:
    """Let every call of ``model`` go through torch.compile, which compiles at its first calls."""
    # In this process: a pool of compilers would outlive a trainer that is killed.
    inductor_config.compile_threads = 1
    torch.compiler.set_stance("default")
    model.compile(backend=BACKEND)


def freeze_compiled() -> None:
    """Compile nothing more in this process: what is not compiled yet runs as it is written."""
    torch.compiler.set_stance("eager_on_recompile")


@contextlib.contextmanager
def signs_of_life(beat: Callable[[], None]) -> Iterator[None]:
    """Let a thread beat while the main one compiles, which takes a minute and says nothing."""
    is_over = threading.Event()
    until = time.monotonic() + COMPILE_PATIENCE_S

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
    """Let ``model`` run as it is written again."""
    model._compiled_call_impl = None  # what nn.Module.compile sets; torch has no way back
    torch._dynamo.reset()


def mark_batch(batch: Any, count: int) -> None:
    """Tell the compiler that a batch's first dimension will change: one compilation serves all.

    Args:
        batch: Tensors, however nested, where the model is.
        count: The samples that it was made of.
    """
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
    """Return what went wrong, in one line."""
    # The first line may say no more than which backend raised, and the second what.
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()][:2]
    words = f"{type(exc).__name__}: {' '.join(lines)}".rstrip(": ")
    return words if len(words) <= MAX_REASON else f"{words[:MAX_REASON]} ..."
