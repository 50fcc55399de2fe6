"""Jobs with ``eval.predict`` and ``eval.score``; importable by other processes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NUM_SAMPLES, BATCH, MICRO = 51, 16, 4
CALLS = "ETRAIN_TEST_CALLS"
"""Environment variable with the file to which ``predict`` appends a line per call."""


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator)
    x[:, 0] = torch.arange(NUM_SAMPLES) / NUM_SAMPLES
    return x, torch.arange(NUM_SAMPLES) % 3


def predict(model: nn.Module, batch: Any) -> list[dict[str, Any]]:
    x, _ = batch
    first = round(float(x[0, 0]) * NUM_SAMPLES)
    assert not model.training
    assert not torch.is_grad_enabled()
    if len(x) > 2:  # not in the warm-up
        with Path(os.environ[CALLS]).open("a") as file:
            file.write(f"{first}\n")
    noise = torch.randn(len(x))  # seeded by the position in the set
    return [
        {"position": first + row, "logits": output, "noise": noise[row]}
        for row, output in enumerate(model(x))
    ]


def score(records: list[dict[str, Any]]) -> dict[str, float]:
    assert [record["position"] for record in records] == list(range(NUM_SAMPLES))
    parts = [record[name].numpy().tobytes() for record in records for name in ("logits", "noise")]
    digest = hashlib.sha256(b"".join(parts)).digest()
    return {"digest": float(int.from_bytes(digest[:6], "big")), "count": float(len(records))}


def predict_much(model: nn.Module, batch: Any) -> list[dict[str, Any]]:
    """Return records of 10 MB together, which take several windows."""
    return [{**record, "more": bytes(200_000)} for record in predict(model, batch)]


def large_names() -> dict[str, Any]:
    return {**names(), "eval.predict": predict_much}


def make_unlabelled() -> dict[str, torch.Tensor]:
    return {"rows": make_data()[0]}


def predict_unlabelled(model: nn.Module, batch: Any) -> list[dict[str, Any]]:
    return predict(model, (batch["rows"], None))


def names_without_targets() -> dict[str, Any]:
    more = {"data.eval": make_unlabelled(), "eval.predict": predict_unlabelled}
    return {**names(), **more}


def names() -> dict[str, Any]:
    return {
        "model": lambda: nn.Linear(4, 3),
        "data.train": make_data(),
        "data.eval": make_data(),
        "loss": F.cross_entropy,
        "eval.predict": predict,
        "eval.score": score,
    }


def keys(**more: Any) -> dict[str, Any]:
    return {
        "model": "Net",
        "data": {"train": "d", "eval": "d"},
        "loss": "f",
        "eval": {"every": "1 epoch", "predict": "p", "score": "s"},
        "batch": {"global": BATCH, "micro": MICRO},
        "reproducible": {"shards": 4},
        "epochs": 2,
        **more,
    }
