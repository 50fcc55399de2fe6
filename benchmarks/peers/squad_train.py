"""The ``Trainer`` of ``transformers`` on the task of ``squad``: the peer of that benchmark.

Usage: ``python -m benchmarks.peers.squad_train TASK FOLDER``, or under ``torchrun``. It writes the
weights to ``FOLDER/model``, and the completion time of each step to ``FOLDER/times.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.models.squad_work import Task, load_encoder, make_features, read_task
from etrain_jupyter.rules.samples.ledger import epoch_order


class StepTimes(TrainerCallback):
    """Records when each step is complete."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **keys: Any) -> None:
        """Append the time."""
        self.times.append(time.time())


class SameOrder(Sampler[int]):
    """Our order of the samples, so that scores do not differ because of it."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self._seed, self._num_samples, self._epoch = seed, num_samples, 0

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(seed=self._seed, epoch=self._epoch, num_samples=self._num_samples)
        self._epoch += 1
        return iter(order.tolist())


class SameTaskTrainer(Trainer):
    """The Trainer, with our order of the samples and learning rates."""

    task: Task

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        dataset: Any = self.train_dataset
        return SameOrder(self.task.seed, len(dataset))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        chosen: Any = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self.task.factor_at)
        return self.lr_scheduler


def main() -> None:
    """Train with the settings of the task."""
    task, folder = read_task(Path(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=task.steps,
        per_device_train_batch_size=task.batch // num_ranks,
        learning_rate=task.lr,
        weight_decay=task.weight_decay,
        max_grad_norm=1.0,
        seed=task.seed,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo" if num_ranks > 1 and not torch.cuda.is_available() else None,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    steps = StepTimes()
    trainer = SameTaskTrainer(
        model=load_encoder(task.encoder, task.seed),
        args=arguments,
        train_dataset=make_features(task, "train"),
        data_collator=default_collate,
        callbacks=[steps],
    )
    trainer.task = task
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(str(folder / "model"))
        (folder / "times.json").write_text(json.dumps(steps.times), encoding="utf-8")


if __name__ == "__main__":
    main()
