"""The ``Trainer`` of ``transformers`` on the task of ``squad``: the peer of that benchmark.

Usage: ``python -m benchmarks.peers.squad_train TASK FOLDER``, or under ``torchrun``. It writes the
weights to ``FOLDER/model``, and the completion time of each step to ``FOLDER/times.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.squad_work import load_encoder, make_features, read_task
from etrain_jupyter.recipes import squad


class StepTimes(TrainerCallback):
    """Records when each step is complete."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **keys: Any) -> None:
        """Append the time."""
        self.times.append(time.time())


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
        warmup_steps=task.warmup,
        lr_scheduler_type="linear",
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
    trainer = Trainer(
        model=load_encoder(task.encoder),
        args=arguments,
        train_dataset=make_features(task, "train"),
        data_collator=squad.collate,
        callbacks=[steps],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(str(folder / "model"))
        (folder / "times.json").write_text(json.dumps(steps.times), encoding="utf-8")


if __name__ == "__main__":
    main()
