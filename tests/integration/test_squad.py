"""Fine-tune a small ALBERT on hand-made questions, with the official scores in the log."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from etrain_jupyter.log.events import EvalScored, WorkerLost
from etrain_jupyter.recipes import squad
from etrain_jupyter.recipes.results import results_table
from etrain_jupyter.recipes.squad import Gold, Question
from etrain_jupyter.testing.invariants import assert_invariants
from tests.integration.conftest import until
from tests.unit.recipes.vocabularies import albert_tokenizer

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(400)

ANIMALS, PLACES = ("cat", "dog"), ("mat", "1987")
MAX_LENGTH = 24


def questions() -> list[Question]:
    """Return twelve questions; those about another animal have no answer."""
    found = []
    for animal in ANIMALS:
        for place in PLACES:
            context = f"The {animal} sat on the {place}."
            for text, answer in (
                (f"who sat on the {place}", animal),
                (f"where sat the {animal}", place),
            ):
                gold = Gold(text=answer, start=context.index(answer))
                found.append((text, context, (gold,)))
            other = ANIMALS[animal == ANIMALS[0]]
            found.append((f"where sat the {other}", context, ()))
    return [
        Question(id=str(n), text=text, context=context, golds=golds, may_be_unanswerable=True)
        for n, (text, context, golds) in enumerate(found)
    ]


TOKENIZER = albert_tokenizer()
TRAIN = squad.Features(questions() * 8, TOKENIZER, is_training=True, max_length=MAX_LENGTH)
DEV = squad.Features(questions(), TOKENIZER, max_length=MAX_LENGTH)


def small_albert() -> Any:
    config = transformers.AlbertConfig(
        vocab_size=len(TOKENIZER),
        embedding_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.AlbertForQuestionAnswering(config)


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": small_albert,
        "data": {"train": TRAIN, "eval": DEV, "collate": squad.collate},
        "eval": {"every": "60 steps", "predict": squad.predict, "score": squad.score},
        "checkpoint": {"best": {"metric": "f1", "mode": "max"}},
        "optimizer": {"name": "RAdam", "lr": 3e-3, "weight_decay": 0.01, "no_decay": "auto"},
        "clip_grad_norm": 1.0,
        "batch": {"global": 16},
        "steps": 240,
        "workers": {"min": 1, "max": 2},
        **changes,
    }


def test_albert_learns_the_answers_and_the_best_checkpoint_gives_them(submit: Any) -> None:
    job = submit(**body())
    until(lambda: job.status == "failed" or (job.step >= 12 and job.world_size == 2), "two ranks")
    os.kill(job.workers()[1]["trainer_pid"], signal.SIGKILL)

    assert job.wait(300) == "finished", job

    assert_invariants(job.events())
    assert [event for event in job.events() if isinstance(event, WorkerLost)] != []
    scored = [event.scores for event in job.events() if isinstance(event, EvalScored)]
    best = max(scores["f1"] for scores in scored)
    assert len(scored) == 4
    assert best > 60  # "no answer" to all questions gives 33
    assert {"exact", "f1", "HasAns_f1", "NoAns_f1", "best_f1", "best_f1_thresh"} <= set(scored[0])
    [row] = results_table([job])
    assert (row["job"], row["f1"]) == (job.name, best)
    assert 1 <= row["workers"] <= 2
    assert row["samples_per_s"] > row["samples_per_s_overall"] > 0
    model = job.load_into(small_albert(), which="best")
    answered = {
        q.id: squad.answer(model, TOKENIZER, q.text, q.context, max_length=MAX_LENGTH)[0].text
        for q in questions()
    }
    assert squad.official_scores(questions(), answered)["f1"] == pytest.approx(best)
