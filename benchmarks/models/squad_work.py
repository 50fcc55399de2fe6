"""The fine-tuning task that etrain-jupyter and the ``Trainer`` share."""

from __future__ import annotations

import argparse
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


def select(
    options: argparse.Namespace, max_characters: int
) -> tuple[list[squad.Question], list[squad.Question]]:
    """Return answerable questions about short contexts: for training, and held-out ones.

    Held-out questions are about articles without a question for training, because a split may share
    articles with another file.

    Args:
        options: ``train``, ``dev``, ``questions`` and ``dev_questions``.
        max_characters: Longest context.

    Raises:
        ValueError: If the files have the same articles.
    """
    train = squad.read(options.train) if options.train else squad.download("train")
    dev = squad.read(options.dev) if options.dev else squad.download("dev")
    titles, contexts = {q.title for q in train} - {""}, {q.context for q in train}
    held_out = [q for q in dev if q.title not in titles and q.context not in contexts]
    chosen = []
    for questions, count in (held_out, options.dev_questions), (train, options.questions):
        short = [q for q in questions if q.golds and len(q.context) <= max_characters]
        # Evenly over the file, and so over its articles.
        chosen.append(short[:: max(1, len(short) // count)][:count])
    if not chosen[0]:
        raise ValueError(
            f"{len(dev):,} questions of {options.dev}: none is answerable, short and about an "
            "article that the questions for training lack. Give another --dev."
        )
    return chosen[1], chosen[0]


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
