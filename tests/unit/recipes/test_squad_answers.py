from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes import squad
from etrain_jupyter.recipes.squad import Features, Gold, Question
from tests.unit.recipes.vocabularies import albert_tokenizer, bert_tokenizer

pytest.importorskip("transformers", reason="platform: transformers is not installed")

CONTEXT = "The cat sat on the mat. The dog barked in 1987."


def question(id: str, answer: str | None, *, is_v2: bool = True) -> Question:
    golds = () if answer is None else (Gold(text=answer, start=CONTEXT.index(answer)),)
    return Question(id=id, text="who sat", context=CONTEXT, golds=golds, may_be_unanswerable=is_v2)


class Oracle(nn.Module):
    """Gives the labels of a batch high logits, and its CLS token 0."""

    def __init__(self, batch: dict[str, Any], *, strength: float = 10.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._batch = batch
        self._strength = strength

    def forward(self, input_ids: torch.Tensor, **inputs: torch.Tensor) -> SimpleNamespace:
        logits = []
        for key in ("start_positions", "end_positions"):
            found = torch.zeros(input_ids.shape, dtype=torch.bfloat16)
            found[torch.arange(len(input_ids)), self._batch[key]] = self._strength
            logits.append(found)
        return SimpleNamespace(start_logits=logits[0], end_logits=logits[1])


def records_of(questions: list[Question], **windows: int) -> list[dict[str, Any]]:
    features = Features(questions, bert_tokenizer(), **windows)
    batch = squad.collate([features[i] for i in range(len(features))])
    return squad.predict(Oracle(batch), batch)


def test_right_logits_give_full_scores_in_one_window_and_in_many() -> None:
    questions = [question("a", "cat"), question("b", None), question("c", "in 1987")]
    for windows in ({"max_length": 96}, {"max_length": 16, "doc_stride": 4}):
        records = records_of(questions, **windows)

        scores = squad.score(records)

        assert (scores["exact"], scores["f1"], scores["total"]) == (100.0, 100.0, 3)
        assert (scores["HasAns_total"], scores["NoAns_total"]) == (2, 1)
        assert scores["best_f1"] == 100.0
        assert squad.predictions(records) == {"a": "cat", "b": "", "c": "in 1987"}


def test_version_1_never_predicts_no_answer() -> None:
    records = records_of([question("a", "cat", is_v2=False)], max_length=96)
    for record in records:
        record["null"] = 1e6

    assert squad.score(records) == {"exact_match": 100.0, "f1": 100.0}
    assert squad.predictions(records) == {"a": "cat"}


def test_null_threshold_decides_between_the_answer_and_none() -> None:
    record = {
        **{"id": "a", "golds": ["cat"], "may_be_unanswerable": True},
        **{"null": 5.0, "answers": [["cat", 3.0]]},
    }

    assert squad.score([record])["exact"] == 0.0
    assert squad.score([record], null_threshold=2.0)["exact"] == 100.0
    assert squad.predictions([record], null_threshold=2.0) == {"a": "cat"}
    assert squad.predictions([record], null_threshold=1.9) == {"a": ""}


def test_windows_of_a_question_are_merged_by_best_answer_and_lowest_null_score() -> None:
    shared = {"id": "a", "golds": ["cat"], "may_be_unanswerable": True}
    records = [
        {**shared, "null": 9.0, "answers": [["dog", 4.0], ["cat", 3.0]]},
        {**shared, "null": 2.0, "answers": [["cat", 6.0]]},
        {**shared, "null": 7.0, "answers": []},
    ]

    scores = squad.score(records)

    assert squad.predictions(records) == {"a": "cat"}
    assert (scores["exact"], scores["total"], scores["best_exact_thresh"]) == (100.0, 1, -4.0)


def spans_of(starts: list[float], ends: list[float], **options: int) -> list[str]:
    """Return the texts of the candidates in one window, for logits by context token."""
    features = Features([question("a", None)], bert_tokenizer(), max_length=96)
    batch = squad.collate([features[0]])
    first = int((batch["spans"][0, :, 0] >= 0).nonzero()[0])
    logits = [torch.full(batch["input_ids"].shape, -50.0) for _ in range(2)]
    for tensor, values in zip(logits, (starts, ends), strict=True):
        tensor[0, first : first + len(values)] = torch.tensor(values)
    output = SimpleNamespace(start_logits=logits[0], end_logits=logits[1])
    [record] = squad.predict(lambda **inputs: output, batch, **options)
    return [text for text, _ in record["answers"]]


def test_answers_end_after_they_start_and_are_not_too_long() -> None:
    # the cat sat on the mat: the best start is "sat", the best end is "cat".
    starts, ends = [5.0, 1.0, 9.0, 0.0, 0.0, 0.0], [0.0, 9.0, 2.0, 0.0, 0.0, 8.0]

    assert spans_of(starts, ends, n_best=3) == [
        "sat on the mat",
        "The cat",
        "The cat sat on the mat",
    ]
    assert spans_of(starts, ends, n_best=3, max_answer_length=3)[0] == "The cat"
    assert spans_of(starts, ends, n_best=1) == []  # the best start is after the best end


def test_only_context_tokens_are_candidates() -> None:
    features = Features([question("a", None)], bert_tokenizer(), max_length=96)
    batch = squad.collate([features[0]])
    outside = batch["spans"][0, :, 0] < 0
    logits = torch.where(outside, 100.0, 0.0)[None]
    output = SimpleNamespace(start_logits=logits, end_logits=logits)

    [record] = squad.predict(lambda **inputs: output, batch)

    assert record["null"] == 200.0
    assert {value for _, value in record["answers"]} == {0.0}
    assert squad.score([record])["exact"] == 100.0


@pytest.mark.parametrize("make", [bert_tokenizer, albert_tokenizer])
def test_question_in_a_cell_is_answered(make: Any) -> None:
    tokenizer = make()
    windows = Features([question("", "dog")], tokenizer, max_length=24, doc_stride=8)
    batch = squad.collate([windows[i] for i in range(len(windows))])
    model = Oracle(batch).train()

    answers = squad.answer(
        model, tokenizer, "who sat", CONTEXT, n_best=2, max_length=24, doc_stride=8
    )

    assert answers[0].text == "dog"
    assert answers[0].score == 20.0
    assert 0.99 < answers[0].probability <= 1.0
    assert len(answers) == 2
    assert model.training


def test_question_without_an_answer_gets_the_empty_text() -> None:
    tokenizer = bert_tokenizer()
    windows = Features([question("", None)], tokenizer, max_length=96)
    model = Oracle(squad.collate([windows[0]]))

    assert squad.answer(model, tokenizer, "who sat", CONTEXT, max_length=96)[0].text == ""
    forced = squad.answer(
        model, tokenizer, "who sat", CONTEXT, max_length=96, may_be_unanswerable=False
    )
    assert all(found.text for found in forced)
    with pytest.raises(RecipeError, match="no possible answer"):
        squad.answer(model, tokenizer, "who", " ", max_length=96, may_be_unanswerable=False)


def test_unsuitable_batch_or_model_is_refused() -> None:
    train = Features([question("a", "cat")], bert_tokenizer(), max_length=96, is_training=True)
    full = Features([question("a", "cat")], bert_tokenizer(), max_length=96)

    with pytest.raises(RecipeError, match=r"without is_training as data\.eval"):
        squad.predict(Oracle({}), squad.collate([train[0]]))
    with pytest.raises(RecipeError, match="returns SimpleNamespace without start_logits"):
        squad.predict(lambda **inputs: SimpleNamespace(logits=1), squad.collate([full[0]]))
