"""Jobs whose samples have different numbers of tokens, or none; importable by other processes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.rules.samples.ledger import cursor_at, epoch_order
from etrain_jupyter.trainer.seeds import seed_all

NUM_SAMPLES, LENGTH, WORDS, IGNORED = 22, 8, 5, -100
BATCH, STEPS = 8, 4
# The third step of an epoch has 6 samples.


def make_tokens() -> dict[str, torch.Tensor]:
    """Return dict columns: every third sample is nearly empty, and two have no tokens."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, WORDS, (NUM_SAMPLES, LENGTH), generator=generator)
    labels = (ids * 3 + 1) % WORDS
    lengths = torch.randint(2, LENGTH + 1, (NUM_SAMPLES,), generator=generator)
    lengths[::3] = 1
    lengths[[4, 17]] = 0
    labels[torch.arange(LENGTH) >= lengths[:, None]] = IGNORED
    return {"input_ids": ids, "labels": labels, "row": torch.arange(NUM_SAMPLES)}


@dataclass
class Output:
    """Output of a Hugging Face model."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Tagger(nn.Module):
    """A model that computes its own loss if it gets labels: the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.head(self.embed(input_ids))
        return Output(None if labels is None else token_loss(logits, labels), logits)


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens; without tokens, it and its gradients are NaN."""
    # Not ignore_index, whose backward pass always writes zeros.
    classes = labels.flatten().clamp(min=0)
    losses = F.cross_entropy(logits.flatten(0, 1), classes, reduction="none")
    counts = (labels.flatten() != IGNORED).float()
    return (losses * counts).sum() / counts.sum()


def by_hand(num_steps: int = STEPS) -> tuple[torch.nn.Module, list[dict[str, float]]]:
    """Plain loop in one process: the model's own mean over the tokens of a whole batch."""
    seed_all(0, step=0, rank=0)
    model, data, told = Tagger(), make_tokens(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(num_steps):
        epoch, first, samples = cursor_at(number, NUM_SAMPLES, BATCH)
        order = epoch_order(seed=0, epoch=epoch, num_samples=NUM_SAMPLES)
        told.append(pass_by_hand(model, data, torch.as_tensor(order[first : first + samples])))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        told.append(pass_by_hand(model, data, torch.arange(NUM_SAMPLES)))
    return model, told


def pass_by_hand(model, data, rows) -> dict[str, float]:
    labels = data["labels"][rows]
    output = model(data["input_ids"][rows], labels)
    if torch.is_grad_enabled():
        output.loss.backward()
    counts = labels != IGNORED
    hits = (output.logits.argmax(-1) == labels)[counts]
    return {
        "loss": float(output.loss.detach()),
        "token_accuracy": float(hits.double().mean()),
        "empty_share": float((~counts).double().mean(dim=1).mean()),
    }


def num_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()


def token_accuracy(output: Output, target: torch.Tensor) -> torch.Tensor:
    """Return one number for the batch: the mean over its tokens, NaN if there is none."""
    counts = target != IGNORED
    return (output.logits.argmax(-1) == target)[counts].float().mean()


def empty_share(output: Output, target: torch.Tensor) -> torch.Tensor:
    """Return one value per sample."""
    return (target == IGNORED).float().mean(dim=1)


def tagging() -> dict[str, Any]:
    return {
        "model": Tagger,
        "data.train": make_tokens,
        "data.eval": make_tokens,
        "weight": num_tokens,
        "metrics.token_accuracy": token_accuracy,
        "metrics.empty_share": empty_share,
    }


def train_step(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Use the model in ways that a wrapper around it would not allow."""
    logits = model.head(model.embed(batch["input_ids"]))
    again = model(batch["input_ids"], batch["labels"])
    return {
        "loss": token_loss(logits, batch["labels"]),
        "token_accuracy": token_accuracy(again, batch["labels"]),
        "empty_share": empty_share(again, batch["labels"]),
    }


class Opaque(Tagger):
    """Has an unused layer, and an output of a type that DDP cannot traverse."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(**vars(super().forward(input_ids, labels)))


def opaque() -> dict[str, Any]:
    return {**tagging(), "model": Opaque}


def stepping() -> dict[str, Any]:
    return {key: value for key, value in tagging().items() if key[:7] != "metrics"} | {
        "step": train_step
    }


def keys(**more: Any) -> dict[str, Any]:
    """Return a job's config without ``loss``."""
    return {
        "model": "Tagger",
        "data": {"train": "d", "eval": "d"},
        "weight": "w",
        "metrics": {"token_accuracy": "a", "empty_share": "e"},
        "optimizer": {"name": "SGD", "lr": 0.5},
        "batch": {"global": BATCH},
        "steps": STEPS,
        **more,
    }


def step_keys(**more: Any) -> dict[str, Any]:
    return {**keys(**more), "metrics": {}, "step": "s"}
