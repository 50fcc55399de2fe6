from __future__ import annotations

import json
import warnings
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes import squad
from etrain_jupyter.recipes.squad import Features, Gold, Question
from tests.unit.recipes.vocabularies import albert_tokenizer, bert_tokenizer

pytest.importorskip("transformers", reason="platform: transformers is not installed")

CONTEXT = "The cat sat on the mat. The dog barked in 1987."
TOKENIZERS = {"bert": bert_tokenizer(), "albert": albert_tokenizer()}


def question(text: str = "who barked", *, answer: str | None = "dog", **keys: Any) -> Question:
    context = keys.get("context", CONTEXT)
    golds = () if answer is None else (Gold(text=answer, start=context.index(answer)),)
    found = {"id": "q", "context": context, "golds": golds, "may_be_unanswerable": True, **keys}
    return Question(text=text, **found)


def text_of(window: dict[str, Any], first: int, last: int) -> str:
    context = json.loads(window["reference"])["context"]
    return str(context[window["spans"][first, 0] : window["spans"][last, 1]]).strip()


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


@pytest.mark.parametrize("answer", ["cat", "The dog", "1987", "sat on the mat. The", CONTEXT])
def test_labels_are_the_tokens_of_the_answer(tokenizer: Any, answer: str) -> None:
    [window] = Features([question(answer=answer)], tokenizer, max_length=96, doc_stride=8)

    labels = int(window["start_positions"]), int(window["end_positions"])

    assert text_of(window, *labels) == answer


def test_answer_within_a_token_gets_the_token(tokenizer: Any) -> None:
    [window] = Features([question(answer="ma")], tokenizer, max_length=96, doc_stride=8)

    assert text_of(window, int(window["start_positions"]), int(window["end_positions"])) == "mat"


def test_window_without_the_answer_is_labelled_with_the_cls_token(tokenizer: Any) -> None:
    features = Features([question(answer="1987")], tokenizer, max_length=16, doc_stride=4)
    windows = [features[i] for i in range(len(features))]
    labels = [(int(w["start_positions"]), int(w["end_positions"])) for w in windows]
    [none] = Features([question(answer=None)], tokenizer, max_length=96)

    assert len(windows) > 1
    assert labels[0] == (0, 0)
    assert text_of(windows[-1], *labels[-1]) == "1987"
    assert (int(none["start_positions"]), int(none["end_positions"])) == (0, 0)


def test_segments_tell_question_and_context_apart(tokenizer: Any) -> None:
    [window] = Features([question()], tokenizer, max_length=96)
    in_context = window["spans"][:, 0] >= 0

    assert window["token_type_ids"][in_context].unique().tolist() == [1]
    assert window["token_type_ids"][:3].tolist() == [0, 0, 0]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Question, int, int]:
    words = draw(
        st.lists(
            st.sampled_from(["the", "cat", "dogs", "1987", "x.", "é", "mat,"]),
            min_size=1,
            max_size=60,
        )
    )
    gaps = draw(
        st.lists(st.sampled_from([" ", "  ", "\n"]), min_size=len(words), max_size=len(words))
    )
    context = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    first = draw(st.integers(0, len(words) - 1))
    last = draw(st.integers(first, min(first + 3, len(words) - 1)))
    start = sum(len(words[i]) + len(gaps[i]) for i in range(first))
    stop = sum(len(words[i]) + len(gaps[i]) for i in range(last)) + len(words[last])
    golds = (Gold(text=context[start:stop], start=start),)
    stride = draw(st.integers(1, 20))
    length = stride + draw(st.integers(8, 40))
    return question(answer=None, context=context, golds=golds), length, stride


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(sorted(TOKENIZERS)))
def test_windows_cover_each_token_and_one_of_them_lets_it_start(
    case: tuple[Question, int, int], name: str
) -> None:
    asked, length, stride = case
    tokenizer = TOKENIZERS[name]
    whole = tokenizer(asked.context, add_special_tokens=False, return_offsets_mapping=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an answer may be longer than a window
        features = Features([asked], tokenizer, max_length=length, doc_stride=stride)
    windows = [features[i] for i in range(len(features))]

    spans = [w["spans"][w["spans"][:, 0] >= 0].tolist() for w in windows]
    begin, starts = 0, []
    for window, covered in zip(windows, spans, strict=True):
        assert covered == [list(o) for o in whole["offset_mapping"][begin : begin + len(covered)]]
        allowed = window["may_start"][window["spans"][:, 0] >= 0]
        starts += [begin + i for i in torch.where(allowed)[0].tolist()]
        begin += len(covered) - stride
    assert sorted(starts) == list(range(len(whole["input_ids"])))
    for window in windows:
        first, last = int(window["start_positions"]), int(window["end_positions"])
        if last:
            assert asked.golds[0].text.strip() in text_of(window, first, last)


def test_collate_removes_only_padding(tokenizer: Any) -> None:
    features = Features(
        [question(), question(id="r", context="The cat sat.", answer="cat")],
        tokenizer,
        max_length=96,
    )
    samples = [features[0], features[1]]

    batch = squad.collate(samples)

    length = int(samples[0]["attention_mask"].sum())
    assert batch["input_ids"].shape == (2, -(-length // 8) * 8)
    assert batch["spans"].shape == (*batch["input_ids"].shape, 2)
    assert batch["attention_mask"].sum(1).tolist() == [
        int(s["attention_mask"].sum()) for s in samples
    ]
    assert [json.loads(text)["id"] for text in batch["reference"]] == ["q", "r"]


def test_training_windows_are_the_same_without_what_only_predict_reads(tokenizer: Any) -> None:
    asked = [question(), question(id="r", answer=None)]
    train = Features(asked, tokenizer, is_training=True, max_length=96)
    full = Features(asked, tokenizer, max_length=96)

    assert set(full[0]) - set(train[0]) == {"spans", "may_start", "cls_position", "reference"}
    assert all(torch.equal(train[i][key], full[i][key]) for i in (0, 1) for key in train[0])
    assert repr(train) == "Features: 2 windows of at most 96 tokens for 2 questions"
    assert b"barked" not in cloudpickle.dumps(train)


def test_long_question_is_truncated(tokenizer: Any) -> None:
    asked = question("who barked " * 50)

    [window] = Features([asked], tokenizer, max_length=96, max_query_length=6)
    same = Features([asked], tokenizer, max_length=96, max_query_length=6)[0]

    types = window["token_type_ids"][window["attention_mask"].bool()]
    assert int((types == 0).sum()) == 6 + 2  # with CLS and SEP
    assert torch.equal(window["input_ids"], same["input_ids"])


def test_errors_name_the_values_and_the_remedy(tokenizer: Any) -> None:
    with pytest.raises(RecipeError, match=r"max_length=96 leaves \d+ tokens.*doc_stride=128"):
        Features([question()], tokenizer, max_length=96, doc_stride=128)
    wrong = question(answer=None, golds=(Gold(text="dog", start=4),))
    with pytest.raises(RecipeError, match=r"'q': the answer 'dog' .* answer_start=4.*'cat sat"):
        Features([wrong], tokenizer, max_length=96, doc_stride=8)
    with pytest.raises(RecipeError, match="the list of questions is empty"):
        Features([], tokenizer)
    with pytest.warns(UserWarning, match=r"1 of 1 answers are in no window of 16 .*'q'"):
        Features([question(answer=CONTEXT)], tokenizer, max_length=16, doc_stride=4)


def test_tokenizer_that_does_not_fit_is_refused() -> None:
    short = bert_tokenizer(model_max_length=32)
    with pytest.raises(RecipeError, match=r"max_length=384 exceeds the 32 tokens"):
        Features([question()], short)
    left = bert_tokenizer(padding_side="left")
    with pytest.raises(RecipeError, match=r"pads on the left"):
        Features([question()], left)

    class Slow:
        is_fast = False

    with pytest.raises(RecipeError, match=r"Slow reports no character offsets"):
        Features([question()], Slow())


def test_index_beyond_the_end_ends_iteration(tokenizer: Any) -> None:
    features = Features([question()], tokenizer, max_length=96)

    with pytest.raises(IndexError, match="window 1 of 1"):
        features[1]
    assert np.asarray(features[0]["input_ids"]).shape == (96,)
