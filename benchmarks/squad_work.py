"""The fine-tuning task that etrain-jupyter and the ``Trainer`` share."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etrain_jupyter.recipes import squad

MAX_LENGTH = 160


@dataclass(frozen=True, kw_only=True)
class Task:
    """A fine-tuning run."""

    encoder: str
    """What ``from_pretrained`` opens."""
    folder: str
    """Folder with ``train.json`` and ``dev.json``: rows with the columns of the hub's set."""
    steps: int
    batch: int
    lr: float = 2e-4
    weight_decay: float = 0.01
    seed: int = 0

    @property
    def warmup(self) -> int:
        """Steps of the warm-up: a tenth."""
        return max(1, self.steps // 10)

    def factor_at(self, step: int) -> float:
        """Return the factor of the learning rate in a step, from 0.

        The rate rises in ``warmup`` steps, and falls to 0 at the end. (The schedules of
        ``transformers`` begin one step earlier, with a step at rate 0.)
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 1 - (step - self.warmup) / (self.steps - self.warmup)

    def with_seed(self, seed: int) -> Task:
        """Return the task with another seed."""
        return dataclasses.replace(self, seed=seed)

    def to_json(self) -> str:
        """Return the task as text."""
        return json.dumps(dataclasses.asdict(self))


def read_task(path: Path) -> Task:
    """Read what ``to_json`` returned."""
    return Task(**json.loads(path.read_text(encoding="utf-8")))


def load_encoder(name: str, seed: int = 0) -> Any:
    """Return the pretrained encoder with a new layer for answers, without dropout.

    Without dropout, the runs differ only in rounding. With it, the scores after so few steps depend
    on when the loss begins to fall, by 15 points of F1 and more.
    """
    from transformers import AutoModelForQuestionAnswering
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return AutoModelForQuestionAnswering.from_pretrained(
            name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )


def make_features(task: Task, split: str) -> squad.Features:
    """Return the windows of ``train`` or ``dev``."""
    from transformers import AutoTokenizer

    rows = json.loads((Path(task.folder) / f"{split}.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(task.encoder)
    return squad.Features(
        squad.read(rows), tokenizer, is_training=split == "train", max_length=MAX_LENGTH
    )
