"""Jobs with ``eval.predict`` and ``eval.score``; importable by other processes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NUM_SAMPLES, BATCH, MICRO = 51, 16, 4


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator)
    x[:, 0] = torch.arange(NUM_SAMPLES) / NUM_SAMPLES
    return x, torch.arange(NUM_SAMPLES) % 3


def predict(model: nn.Module, batch: Any, *, calls: str) -> list[dict[str, Any]]:
    """Append a line to the file ``calls``, and return a list with one record per sample."""
    x, _ = batch
    first = round(float(x[0, 0]) * NUM_SAMPLES)
    assert not model.training
    assert not torch.is_grad_enabled()
    if len(x) > 2:  # not in the warm-up
        with Path(calls).open("a") as file:
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


def predict_much(model: nn.Module, batch: Any, *, calls: str) -> list[dict[str, Any]]:
    """Return records of 10 MB together, which take several windows."""
    records = predict(model, batch, calls=calls)
    return [{**record, "more": bytes(200_000)} for record in records]


def predict_unlabelled(model: nn.Module, batch: Any, *, calls: str) -> list[dict[str, Any]]:
    """Predict a batch that has no targets."""
    return predict(model, (batch["rows"], None), calls=calls)


def names(calls: str) -> dict[str, Any]:
    return {
        "model": lambda: nn.Linear(4, 3),
        "data.train": make_data(),
        "data.eval": make_data(),
        "loss": F.cross_entropy,
        "eval.predict": functools.partial(predict, calls=calls),
        "eval.score": score,
    }


def large_names(calls: str) -> dict[str, Any]:
    return {**names(calls), "eval.predict": functools.partial(predict_much, calls=calls)}


def names_without_targets(calls: str) -> dict[str, Any]:
    more = {"eval.predict": functools.partial(predict_unlabelled, calls=calls)}
    return {**names(calls), "data.eval": {"rows": make_data()[0]}, **more}


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
