"""Pretrain a small ALBERT from shards: masks under a kill, both heads, and the exported model."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.data import Shards, batch_key
from etrain_jupyter.log.events import WorkerLost
from etrain_jupyter.recipes import language_modeling as lm
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long
from tests.integration.conftest import PATIENCE_S, until
from tests.unit.recipes.vocabularies import bert_tokenizer

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("pyarrow", reason="platform: pyarrow is not installed")

pytestmark = pytest.mark.timeout(400)

FOLDER = Path(tempfile.mkdtemp())
MASKS = FOLDER / "masks"
"""A line for each sample of a batch: epoch, sample, and digest of its tokens and labels."""
SLOW = FOLDER / "slow"
"""While this file exists, batches are slow."""
MAX_LENGTH = 32
TOKENIZER = bert_tokenizer()


class LoggedMasking(lm.Masking):
    """Masking that logs the masks of each sample."""

    def __call__(self, samples: Sequence[Any]) -> Any:
        batch = super().__call__(samples)
        key = batch_key()
        assert key is not None
        if SLOW.exists():
            time.sleep(0.2)
        lines = []
        for row, sample in enumerate(key.samples):
            length = int(batch["attention_mask"][row].sum())
            content = (
                batch["input_ids"][row, :length].tolist(),
                batch["labels"][row, :length].tolist(),
            )
            digest = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
            lines.append(f"{key.seed} {key.epoch} {sample} {digest}\n")
        with MASKS.open("a") as file:
            file.write("".join(lines))
        return batch


def small_albert() -> Any:
    config = transformers.AlbertConfig(
        vocab_size=len(TOKENIZER),
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=MAX_LENGTH,
    )
    return transformers.AlbertForPreTraining(config)


@pytest.fixture(scope="module")
def corpus() -> Shards:
    documents = [["The cat sat on the mat.", "The dog barked.", "Who sat in 1987?"] * 5] * 20
    return lm.write_corpus(
        documents, TOKENIZER, FOLDER / "corpus", max_length=MAX_LENGTH, progress=False
    )


def body(corpus: Shards, **changes: Any) -> dict[str, Any]:
    return {
        "model": small_albert,
        "data": {"train": corpus, "collate": LoggedMasking(TOKENIZER, max_length=MAX_LENGTH)},
        "step": lm.step,
        "weight": lm.num_masked,
        "optimizer": {"name": "LAMB", "lr": 0.005, "weight_decay": 0.01, "no_decay": "auto"},
        "schedule": {"warmup": "2 steps", "decay": "linear"},
        "batch": {"global": 16},
        "precision": "bf16",
        "seed": 3,
        "epochs": 3,
        "workers": {"min": 1, "max": 1},
        **changes,
    }


def masks() -> dict[tuple[int, int], str]:
    """Return the digest by epoch and sample; a repeated sample must have the same one."""
    found: dict[tuple[int, int], str] = {}
    for line in MASKS.read_text().splitlines():
        seed, epoch, sample, digest = line.split()
        if seed == "3":  # not a pass of the warm-up
            key = int(epoch), int(sample)
            assert found.setdefault(key, digest) == digest, f"sample {key} has two masks"
    MASKS.unlink()
    return found


@long
def test_masks_are_the_same_for_one_worker_and_for_two_of_which_one_is_killed(
    submit: Any, corpus: Shards, tmp_path: Path
) -> None:
    alone = submit(**body(corpus))
    assert alone.wait(PATIENCE_S) == "finished", alone
    expected = masks()

    SLOW.touch()
    job = submit(**body(corpus, workers={"min": 2, "max": 2}))
    until(lambda: job.status == "failed" or (job.step >= 2 and job.world_size == 2), "two ranks")
    os.kill(job.workers()[1]["trainer_pid"], signal.SIGKILL)
    until(lambda: any(isinstance(event, WorkerLost) for event in job.events()), "the loss")
    SLOW.unlink()
    assert job.wait(PATIENCE_S) == "finished", job
    assert_invariants(job.events())

    assert masks() == expected
    assert sorted(expected) == [(e, n) for e in range(3) for n in range(len(corpus))]
    assert expected[0, 0] != expected[1, 0]
    assert {"mlm_loss", "order_loss", "order_accuracy"} <= set(job.metrics)
    # The body of the exported model is that of a question answering model.
    folder = job.export(tmp_path / "albert", format="transformers")
    tuned = transformers.AlbertForQuestionAnswering.from_pretrained(folder)
    pretrained = job.load_into(small_albert())
    words = tuned.albert.embeddings.word_embeddings.weight
    assert words.equal(pretrained.albert.embeddings.word_embeddings.weight)
