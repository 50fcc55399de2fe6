"""The official SQuAD scores, equal to those of ``evaluate-v1.1.py`` and ``evaluate-v2.0.py``.

torchmetrics computes only the scores of v1.1. The official scripts add numbers in the order of the
questions, so this module does too, because the last digits depend on the order.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.squad.questions import read

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


Golds = Mapping[str, Sequence[str]]
"""Texts of the correct answers by question id; empty if the paragraph has none."""


def official_scores(
    dataset: Any,
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None = None,
    *,
    na_prob_thresh: float = 1.0,
) -> dict[str, float]:
    """Compute the scores of the official scripts, to the last digit.

    Args:
        dataset: Questions in any form that ``read`` accepts: a path, the parsed JSON, its list of
            articles, rows, or a list of ``Question``. It selects the script: v1.1 or v2.0.
        predictions: Answer by question id; an empty text for "no answer".
        na_probs: Probability that the question has no answer, by id. v2.0 only. Any number that
            orders the questions can be used, such as the null score minus the best score.
        na_prob_thresh: Above this probability, the prediction counts as "no answer".

    Returns:
        For v1.1, ``exact_match`` and ``f1`` over all questions; a missing prediction counts as 0.
        For v2.0, ``exact``, ``f1`` and ``total`` over the questions with a prediction, the same
        with the prefixes ``HasAns_`` and ``NoAns_``, and with ``na_probs`` also ``best_exact``,
        ``best_f1`` and their thresholds, ``best_exact_thresh`` and ``best_f1_thresh``. Scores are
        in percent.

    Raises:
        RecipeError: If no question has a prediction, or a probability is missing.
    """
    questions = read(dataset)
    golds = {question.id: [gold.text for gold in question.golds] for question in questions}
    _check(golds, predictions, na_probs)
    if not any(question.may_be_unanswerable for question in questions):
        if na_probs is not None:
            raise RecipeError(
                "na_probs was given, but all questions are those of SQuAD v1.1, where each has an "
                "answer. Leave na_probs out."
            )
        return scores_of_v1(golds, predictions)
    return scores_of_v2(golds, predictions, na_probs, na_prob_thresh=na_prob_thresh)


def scores_of_v1(golds: Golds, predictions: Mapping[str, str]) -> dict[str, float]:
    """Compute the scores of ``evaluate-v1.1.py``."""
    exact: float = 0
    f1: float = 0
    for id, texts in golds.items():
        if id in predictions:
            exact += max(_exact_of(text, predictions[id]) for text in texts)
            # Without common words, the script of v1.1 returns 0, even for two texts without words.
            f1 += max(_f1_of(text, predictions[id], both_empty=0) for text in texts)
    total = len(golds)
    return {"exact_match": 100.0 * exact / total, "f1": 100.0 * f1 / total}


def scores_of_v2(
    golds: Golds,
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None = None,
    *,
    na_prob_thresh: float = 1.0,
) -> dict[str, float]:
    """Compute the scores of ``evaluate-v2.0.py``; see ``official_scores``."""
    has_answer = {id: bool(texts) for id, texts in golds.items()}
    exact: dict[str, float] = {}
    f1: dict[str, float] = {}
    for id, known in golds.items():
        if id not in predictions:
            continue
        # An answer such as "The" has no words left; the script ignores it.
        texts = [text for text in known if normalize_answer(text)] or [""]
        exact[id] = max(_exact_of(text, predictions[id]) for text in texts)
        f1[id] = max(_f1_of(text, predictions[id]) for text in texts)
    probs = na_probs or {}
    # Above the threshold, the prediction counts as "no answer".
    none = {id: float(not has_answer[id]) for id in exact if probs.get(id, 0.0) > na_prob_thresh}
    final = exact | none, f1 | none
    scores = _means(*final, ids=list(exact), prefix="")
    for prefix, wanted in (("HasAns_", True), ("NoAns_", False)):
        ids = [id for id in exact if has_answer[id] is wanted]
        if ids:
            scores |= _means(*final, ids=ids, prefix=prefix)
    if na_probs is not None:
        for name, raw in (("exact", exact), ("f1", f1)):
            best, threshold = _best_threshold(raw, predictions, na_probs, has_answer)
            scores |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return scores


def normalize_answer(text: str) -> str:
    """Lower-case a text, and remove punctuation, English articles and extra whitespace."""
    text = "".join(char for char in text.lower() if char not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _exact_of(gold: str, prediction: str) -> int:
    return int(normalize_answer(gold) == normalize_answer(prediction))


def _f1_of(gold: str, prediction: str, *, both_empty: float = 1) -> float:
    found, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not found and not wanted:
        return both_empty
    common = sum((Counter(wanted) & Counter(found)).values())
    if not common:
        return 0
    precision = 1.0 * common / len(found)
    recall = 1.0 * common / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def _means(
    exact: Mapping[str, float], f1: Mapping[str, float], *, ids: Sequence[str], prefix: str
) -> dict[str, float]:
    total = len(ids)
    return {
        f"{prefix}exact": 100.0 * sum(exact[id] for id in ids) / total,
        f"{prefix}f1": 100.0 * sum(f1[id] for id in ids) / total,
        f"{prefix}total": total,
    }


def _best_threshold(
    scores: Mapping[str, float],
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    # Begin with "no answer" for all questions, and then accept one prediction after another, in
    # the order of the probabilities.
    current: float = sum(1 for id in has_answer if not has_answer[id])
    best, threshold = current, 0.0
    for id in sorted(na_probs, key=lambda id: na_probs[id]):
        if id not in scores:
            continue
        if has_answer[id]:
            current += scores[id]
        elif predictions[id]:
            current -= 1
        if current > best:
            best, threshold = current, na_probs[id]
    return 100.0 * best / len(scores), threshold


def _check(
    golds: Golds, predictions: Mapping[str, str], na_probs: Mapping[str, float] | None
) -> None:
    predicted = [id for id in golds if id in predictions]
    if not predicted:
        raise RecipeError(
            f"none of the {len(golds)} questions is among the {len(predictions)} predictions. "
            "Give a dict with the answer by question id."
        )
    missing = [id for id in predicted if id not in na_probs] if na_probs is not None else []
    if missing:
        raise RecipeError(
            f"na_probs lacks {len(missing)} of {len(predicted)} predicted questions, for example "
            f"{missing[0]!r}. Give a number for each of them."
        )
