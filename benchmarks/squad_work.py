"""The fine-tuning task that etrain-jupyter and the ``Trainer`` share."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    batch: int = 16
    lr: float = 2e-4
    weight_decay: float = 0.01
    seed: int = 0

    @property
    def warmup(self) -> int:
        """Steps of the warm-up: a tenth."""
        return max(1, self.steps // 10)

    def with_seed(self, seed: int) -> Task:
        """Return the task with another seed."""
        return dataclasses.replace(self, seed=seed)

    def to_json(self) -> str:
        """Return the task as text."""
        return json.dumps(dataclasses.asdict(self))


def read_task(path: Path) -> Task:
    """Read what ``to_json`` returned."""
    return Task(**json.loads(path.read_text(encoding="utf-8")))


def load_encoder(name: str) -> Any:
    """Return the pretrained encoder with a new layer for answers."""
    from transformers import AutoModelForQuestionAnswering
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return AutoModelForQuestionAnswering.from_pretrained(name)


def make_features(task: Task, split: str) -> squad.Features:
    """Return the windows of ``train`` or ``dev``."""
    from transformers import AutoTokenizer

    rows = json.loads((Path(task.folder) / f"{split}.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(task.encoder)
    return squad.Features(
        squad.read(rows), tokenizer, is_training=split == "train", max_length=MAX_LENGTH
    )
