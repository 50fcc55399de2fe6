from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.squad.scores import normalize_answer, official_scores

SQUAD = Path("shared", "data", "squad")
"""Relative to the repository or one of its parent folders."""


def dataset(*golds: list[str], version: str = "v2.0") -> dict[str, Any]:
    """Return a data set in the official format, with the questions q0, q1 ..."""
    questions = [
        {
            "id": f"q{number}",
            "question": "?",
            "answers": [{"text": text, "answer_start": 0} for text in texts],
            **({"is_impossible": not texts} if version == "v2.0" else {}),
        }
        for number, texts in enumerate(golds)
    ]
    paragraph = {"context": " ".join(t for texts in golds for t in texts), "qas": questions}
    return {"version": version, "data": [{"title": "t", "paragraphs": [paragraph]}]}


def scores_of(golds: list[str], prediction: str, version: str = "v2.0") -> tuple[float, float]:
    scores = official_scores(dataset(golds, version=version), {"q0": prediction})
    return scores["exact" if version == "v2.0" else "exact_match"], scores["f1"]


@pytest.mark.parametrize(
    ("golds", "prediction", "exact", "f1"),
    [
        pytest.param(["The cat"], "cat", 100, 100, id="articles"),
        pytest.param(["an apple a day"], "apple day", 100, 100, id="articles in the middle"),
        pytest.param(["theory"], "ory", 0, 0, id="an article only as a whole word"),
        pytest.param(["U.S.A."], "USA", 100, 100, id="punctuation joins letters"),
        pytest.param(["well-known"], "well known", 0, 0, id="a hyphen is removed, not replaced"),
        pytest.param(["it's"], "its", 100, 100, id="apostrophe"),
        pytest.param(["5,000"], "5000", 100, 100, id="comma in a number"),
        pytest.param(["$5"], "5", 100, 100, id="dollar is punctuation"),
        pytest.param(["£5"], "5", 0, 0, id="pound is not in string.punctuation"),
        pytest.param(["“cat”"], "cat", 0, 0, id="typographic quotes are kept"),
        pytest.param(["a.b"], "b", 0, 0, id="punctuation is removed before articles"),
        pytest.param(["New  York\n"], "new york", 100, 100, id="case and whitespace"),
        pytest.param(["New York"], "York New", 0, 100, id="F1 ignores the order"),
        pytest.param(["New York City"], "York", 0, 50, id="F1 of one in three words"),
        pytest.param(["to be to be"], "to be", 0, 200 / 3, id="F1 counts repeated words"),
        pytest.param(["red", "dark red", "blue"], "dark red", 100, 100, id="best of the golds"),
        pytest.param(["red", "dark red wine"], "dark red", 0, 80, id="best F1 of the golds"),
        pytest.param([], "", 100, 100, id="no answer, and none predicted"),
        pytest.param([], "red", 0, 0, id="no answer, but one predicted"),
        pytest.param([], "the", 100, 100, id="only an article is an empty prediction"),
        pytest.param(["red"], "", 0, 0, id="empty prediction"),
        pytest.param(["The"], "", 100, 100, id="a gold without words counts as no answer"),
        pytest.param(["The", "red"], "", 0, 0, id="but only if it is the only one"),
    ],
)
def test_rules_of_version_2(golds: list[str], prediction: str, exact: float, f1: float) -> None:
    assert scores_of(golds, prediction) == (exact, pytest.approx(f1))


@pytest.mark.parametrize(
    ("golds", "prediction", "exact", "f1"),
    [
        (["The cat"], "cat", 100, 100),
        (["red", "dark red wine"], "dark red", 0, 80),
        (["red"], "", 0, 0),
        (["The"], "", 100, 0),  # the script of v1.1 finds no common word
    ],
)
def test_rules_of_version_1(golds: list[str], prediction: str, exact: float, f1: float) -> None:
    assert scores_of(golds, prediction, "1.1") == (exact, pytest.approx(f1))


def test_missing_prediction_counts_as_wrong_in_v1_and_is_left_out_in_v2() -> None:
    golds = ["red"], ["blue"]

    v1 = official_scores(dataset(*golds, version="1.1"), {"q0": "red"})
    v2 = official_scores(dataset(*golds), {"q0": "red"})

    assert v1 == {"exact_match": 50.0, "f1": 50.0}
    assert v2 == {
        **{"exact": 100.0, "f1": 100.0, "total": 1},
        **{"HasAns_exact": 100.0, "HasAns_f1": 100.0, "HasAns_total": 1},
    }


def test_threshold_turns_predictions_into_no_answer() -> None:
    data = dataset(["red"], ["blue"], [], [])
    predictions = {"q0": "red", "q1": "green blue", "q2": "red", "q3": "x"}
    probs = {"q0": 0.1, "q1": 0.7, "q2": 0.9, "q3": 0.3}

    plain = official_scores(data, predictions, probs)
    strict = official_scores(data, predictions, probs, na_prob_thresh=0.5)

    assert (plain["exact"], plain["NoAns_exact"]) == (25.0, 0.0)
    assert (strict["exact"], strict["HasAns_exact"], strict["NoAns_exact"]) == (50.0, 50.0, 50.0)
    for scores in (plain, strict):  # always from the predictions without a threshold
        assert (scores["best_exact"], scores["best_exact_thresh"]) == (75.0, 0.1)
        assert (scores["best_f1"], scores["best_f1_thresh"]) == (75.0, 0.1)


def brute_force(
    gold: list[list[str]], predictions: dict[str, str], probs: dict[str, float]
) -> float:
    """Return the best ``exact`` over all thresholds, including one below all probabilities."""
    data = dataset(*gold)
    thresholds = [min(probs.values()) - 1, *probs.values()]
    return max(
        official_scores(data, predictions, probs, na_prob_thresh=t)["exact"] for t in thresholds
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from([[], ["red"], ["blue", "red"]]),
            st.sampled_from(["", "red", "blue"]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_best_score_is_that_of_the_best_threshold(
    cases: list[tuple[list[str], str]], random: Any
) -> None:
    gold = [texts for texts, _ in cases]
    predictions = {f"q{n}": text for n, (_, text) in enumerate(cases)}
    order = random.sample(range(len(cases)), len(cases))
    probs = {f"q{n}": place / 10 for n, place in enumerate(order)}  # distinct
    if not any(not texts for texts in gold):
        gold[0] = []

    best = official_scores(dataset(*gold), predictions, probs)["best_exact"]

    assert best == pytest.approx(brute_force(gold, predictions, probs))


@given(st.text(alphabet="aAnNtThHeE .,-'\n\u00a0é", max_size=30))
def test_normalizing_twice_changes_nothing_that_once_did_not_join(text: str) -> None:
    once = normalize_answer(text)

    assert normalize_answer(once) == once
    assert once == once.strip()
    assert {"a", "an", "the"} & set(once.split()) == set()


def test_published_predictions_get_the_published_scores() -> None:
    found = [folder / SQUAD for folder in Path(__file__).parents if (folder / SQUAD).is_dir()]
    if not found:
        pytest.skip(f"data: needs SQuAD's dev set and published predictions in {SQUAD}")
    predictions = json.loads((found[0] / "pred-v2.0-bert-single.json").read_text())

    scores = official_scores(found[0] / "dev-v2.0.rebuilt.json", predictions)

    assert scores["exact"] == 78.74168280973637
    assert scores["f1"] == 81.77528052374723
    assert (scores["total"], scores["HasAns_total"], scores["NoAns_total"]) == (11873, 5928, 5945)
    assert scores["HasAns_exact"] == 74.10593792172739
    assert scores["HasAns_f1"] == 80.18183293833508
    assert scores["NoAns_exact"] == scores["NoAns_f1"] == 83.36417157275021


def test_wrong_input_is_refused() -> None:
    data = dataset(["red"], ["blue"])

    with pytest.raises(RecipeError, match=r"none of the 2 questions is among the 1 predictions"):
        official_scores(data, {"other": "red"})
    with pytest.raises(RecipeError, match=r"na_probs lacks 1 of 2 predicted questions.*'q1'"):
        official_scores(data, {"q0": "red", "q1": "x"}, {"q0": 0.5})
    with pytest.raises(RecipeError, match=r"Leave na_probs out"):
        official_scores(dataset(["red"], version="1.1"), {"q0": "red"}, {"q0": 0.5})
