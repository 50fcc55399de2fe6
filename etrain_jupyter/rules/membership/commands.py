"""What is to be done next, as values: the output of the state machine."""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.log.events import Event


@dataclass(frozen=True, kw_only=True)
class StartTrainer:
    """Start a trainer process of this name on a worker."""

    trainer: str
    worker: str


@dataclass(frozen=True, kw_only=True)
class AnnounceChange:
    """Tell the ranks that they shall all leave the generation after the same step."""

    generation: int
    trainers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AbortGeneration:
    """Break the ranks' collectives: a member is gone and the step in flight cannot complete."""

    generation: int
    trainers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FormGeneration:
    """Tell these trainers, in rank order, that they are a generation now."""

    generation: int
    trainers: tuple[str, ...]
    is_guarded: bool = False
    """Whether the ranks admit only announced connections, which takes them longer."""
    behind: tuple[int, ...]
    """Ranks whose state is older than rank 0's: they receive it before the first step."""
    step: int
    """The step that rank 0 stands at."""
    restore: bool
    """Nobody holds state any more: rank 0 loads the newest checkpoint first."""
    backend: str
    """The backend that sums its gradients, ``nccl`` or ``gloo``."""


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint:
    """Ask one trainer, which holds the newest state, to make it durable."""

    trainer: str


@dataclass(frozen=True, kw_only=True)
class AskForCheckpoint:
    """Ask the ranks for a checkpoint in the background, at their next step boundary."""

    trainers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReleaseTrainer:
    """Let a trainer end by itself."""

    trainer: str


@dataclass(frozen=True, kw_only=True)
class KillTrainer:
    """End a trainer's process from outside."""

    trainer: str
    why: str
    stacks: bool = False
    """Log before that what each of its threads is doing."""


@dataclass(frozen=True, kw_only=True)
class DumpStacks:
    """Log what each thread of a trainer is doing, and leave it alone."""

    trainer: str


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Append a fact to the log."""

    event: Event


Command = (
    StartTrainer
    | AnnounceChange
    | AbortGeneration
    | FormGeneration
    | SaveCheckpoint
    | AskForCheckpoint
    | ReleaseTrainer
    | KillTrainer
    | DumpStacks
    | Publish
)
