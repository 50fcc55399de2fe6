"""Predict answers from logits, merge the windows of each question, and score them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.squad.features import MODEL_INPUTS, Features, collate
from etrain_jupyter.recipes.squad.questions import Question
from etrain_jupyter.recipes.squad.scores import scores_of_v1, scores_of_v2

_NO_ANSWER_FOUND = 1e9
"""Null score minus best score if no window has a possible answer. Finite, so that it can be
logged."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A possible answer."""

    text: str
    """Part of the context; empty for "no answer"."""
    score: float
    """Sum of the logits of its first and last token."""
    probability: float
    """Probability among the possible answers that were compared."""


def predict(
    model: Any, batch: Mapping[str, Any], *, n_best: int = 20, max_answer_length: int = 30
) -> list[dict[str, Any]]:
    """Return the best answers in each window, for ``eval.predict``.

    Args:
        model: A question answering model of ``transformers``, or one that returns ``start_logits``
            and ``end_logits`` of shape ``(B, L)``.
        batch: Windows of ``Features`` for an evaluation.
        n_best: Number of first tokens, of last tokens and of answers to keep.
        max_answer_length: Maximum number of tokens in an answer.

    Returns:
        One record per window for ``score``.

    Raises:
        RecipeError: If the batch lacks keys, or the model returns no such logits.
    """
    if "reference" not in batch:
        raise RecipeError(
            f"a batch of data.eval has the keys {', '.join(batch)}, but not those that "
            "squad.predict needs. Use squad.Features(...) without is_training as data.eval."
        )
    output = model(**{key: batch[key] for key in MODEL_INPUTS if key in batch})
    if getattr(output, "start_logits", None) is None or output.end_logits is None:
        raise RecipeError(
            f"the model returns {type(output).__name__} without start_logits and end_logits. Use a "
            "question answering model, such as AutoModelForQuestionAnswering."
        )
    starts, ends = (_array(logits) for logits in (output.start_logits, output.end_logits))
    spans, may_start, cls = (_array(batch[k]) for k in ("spans", "may_start", "cls_position"))
    records = []
    for i, text in enumerate(batch["reference"]):
        reference = json.loads(text)
        context = reference.pop("context")
        found = _best_spans(
            starts[i], ends[i], spans[i], may_start[i], n_best=n_best, longest=max_answer_length
        )
        null = float(starts[i][int(cls[i])] + ends[i][int(cls[i])])
        texts = [(context[first:stop].strip(), value) for first, stop, value in found]
        records.append({**reference, "null": null, "answers": [a for a in texts if a[0]]})
    return records


def score(records: Sequence[Mapping[str, Any]], *, null_threshold: float = 0.0) -> dict[str, float]:
    """Compute the official scores from the records of all windows, for ``eval.score``.

    A question's answer is the best one from all its windows, and its null score is the lowest of
    them. The prediction is "no answer" if the null score exceeds the best answer's by more than
    ``null_threshold``.

    Returns:
        For SQuAD v1.1, ``exact_match`` and ``f1``. For v2.0, ``exact``, ``f1``, their values for
        questions with and without an answer, and the best values with their thresholds; see
        ``official_scores``.
    """
    questions = _merge(records)
    golds = {q.id: q.golds for q in questions}
    texts = {q.id: q.text for q in questions}
    if not any(q.may_be_unanswerable for q in questions):
        return scores_of_v1(golds, texts)
    odds = {q.id: q.null_odds for q in questions}
    return scores_of_v2(golds, texts, odds, na_prob_thresh=null_threshold)


def predictions(
    records: Iterable[Mapping[str, Any]], *, null_threshold: float = 0.0
) -> dict[str, str]:
    """Return the answer by question id, as the official scripts read it."""
    return {
        q.id: "" if q.may_be_unanswerable and q.null_odds > null_threshold else q.text
        for q in _merge(records)
    }


def answer(
    model: Any,
    tokenizer: Any,
    question: str,
    context: str,
    *,
    n_best: int = 3,
    may_be_unanswerable: bool = True,
    max_length: int = 384,
    doc_stride: int | None = None,
) -> list[Answer]:
    """Answer one question with a trained model.

    Args:
        model: The model; it is used on its device, in evaluation mode.
        tokenizer: Its tokenizer.
        question: The question.
        context: Text that may contain the answer, of any length.
        n_best: Number of answers to return.
        may_be_unanswerable: True to include the empty answer.
        max_length: See ``Features``.
        doc_stride: See ``Features``.

    Returns:
        The best answers, most probable first.

    Raises:
        RecipeError: If the context has no possible answer, or as for ``Features``.
    """
    windows = Features(
        [
            Question(
                id="",
                text=question,
                context=context,
                golds=(),
                may_be_unanswerable=may_be_unanswerable,
            )
        ],
        tokenizer,
        max_length=max_length,
        doc_stride=doc_stride,
    )
    batch = collate([windows[i] for i in range(len(windows))])
    device = next(model.parameters()).device
    on_device = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            records = predict(model, on_device)
    finally:
        model.train(was_training)
    [merged] = _merge(records)
    found = dict(merged.candidates)
    if may_be_unanswerable:
        found[""] = merged.null
    if not found:
        raise RecipeError(
            f"the context of {len(context)} characters has no possible answer. Give a context with "
            "at least one word."
        )
    best = sorted(found.items(), key=lambda item: -item[1])
    weights = [math.exp(value - best[0][1]) for _, value in best]
    return [
        Answer(text=text, score=value, probability=weight / sum(weights))
        for (text, value), weight in list(zip(best, weights, strict=True))[:n_best]
    ]


@dataclass(frozen=True, kw_only=True)
class _Merged:
    # The answers to one question, from all its windows.
    id: str
    golds: tuple[str, ...]
    may_be_unanswerable: bool
    null: float
    candidates: dict[str, float]
    """Score by text, best first."""

    @property
    def text(self) -> str:
        return next(iter(self.candidates), "")

    @property
    def null_odds(self) -> float:
        """Null score minus the best answer's."""
        best = next(iter(self.candidates.values()), None)
        return _NO_ANSWER_FOUND if best is None else self.null - best


def _merge(records: Iterable[Mapping[str, Any]]) -> list[_Merged]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        grouped.setdefault(record["id"], []).append(record)
    merged = []
    for id, windows in grouped.items():
        best: dict[str, float] = {}
        for window in windows:
            for text, value in window["answers"]:
                best[text] = max(value, best.get(text, -math.inf))
        ordered = sorted(best.items(), key=lambda item: -item[1])
        merged.append(
            _Merged(
                id=id,
                golds=tuple(windows[0]["golds"]),
                may_be_unanswerable=windows[0]["may_be_unanswerable"],
                null=min(window["null"] for window in windows),
                candidates=dict(ordered),
            )
        )
    return merged


def _best_spans(
    starts: NDArray[Any],
    ends: NDArray[Any],
    spans: NDArray[Any],
    may_start: NDArray[Any],
    *,
    n_best: int,
    longest: int,
) -> list[tuple[int, int, float]]:
    """Return the first and the stop character and the score of the best answers, best first."""
    firsts = _top(starts, may_start.astype(bool), n_best)
    lasts = _top(ends, spans[:, 0] >= 0, n_best)
    scores = starts[firsts][:, None] + ends[lasts][None, :]
    num_tokens = lasts[None, :] - firsts[:, None] + 1
    scores = np.where((num_tokens >= 1) & (num_tokens <= longest), scores, -np.inf)
    # Stable, so that equal scores give the same answer everywhere.
    order = np.argsort(-scores, axis=None, kind="stable")[:n_best]
    return [
        (int(spans[firsts[row], 0]), int(spans[lasts[column], 1]), float(scores[row, column]))
        for row, column in zip(*np.unravel_index(order, scores.shape), strict=True)
        if scores[row, column] > -np.inf
    ]


def _top(logits: NDArray[Any], allowed: NDArray[Any], n_best: int) -> NDArray[np.int64]:
    places = np.flatnonzero(allowed)
    return places[np.argsort(-logits[places], kind="stable")[:n_best]]


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    # NumPy has no bfloat16.
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
