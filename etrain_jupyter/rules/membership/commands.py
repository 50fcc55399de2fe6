"""Commands: the output of the state machine, as values."""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.log.events import Event


@dataclass(frozen=True, kw_only=True)
class StartTrainer:
    """Start a trainer process with this name on a worker."""

    trainer: str
    worker: str


@dataclass(frozen=True, kw_only=True)
class AnnounceChange:
    """Have all ranks leave the generation at the same step boundary."""

    generation: int
    trainers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AbortGeneration:
    """Abort the ranks' collectives, because a rank is gone and the step cannot complete."""

    generation: int
    trainers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FormGeneration:
    """Form the next generation from these trainers, which are in rank order."""

    generation: int
    trainers: tuple[str, ...]
    behind: tuple[int, ...]
    """Ranks with an older state than rank 0's; they receive rank 0's before the first step."""
    step: int
    """The last step committed by rank 0."""
    restore: bool
    """True if no trainer holds the state, so that rank 0 must first load the newest checkpoint."""
    backend: str
    """The backend that sums its gradients, ``nccl`` or ``gloo``."""
    saves: bool = False
    """True if the ranks only save the state together, and then leave."""


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint:
    """Instruct a trainer that holds the newest state to save it and to report."""

    trainer: str


@dataclass(frozen=True, kw_only=True)
class RequestBackgroundCheckpoint:
    """Request a background checkpoint at the next step boundary of the ranks."""

    trainers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReleaseTrainer:
    """Release a trainer, which then exits on its own."""

    trainer: str


@dataclass(frozen=True, kw_only=True)
class KillTrainer:
    """Kill a trainer's process."""

    trainer: str
    why: str
    stacks: bool = False
    """True to log the stacks of all its threads first."""


@dataclass(frozen=True, kw_only=True)
class DumpStacks:
    """Log the stacks of all threads of a trainer without stopping it."""

    trainer: str


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Append an event to the log."""

    event: Event


TrainerCommand = (
    StartTrainer
    | AnnounceChange
    | AbortGeneration
    | FormGeneration
    | SaveCheckpoint
    | RequestBackgroundCheckpoint
    | ReleaseTrainer
    | KillTrainer
    | DumpStacks
)
"""Commands that are carried out by messages to trainers."""

Command = TrainerCommand | Publish
