"""Cut questions and their contexts into windows of tokens, with the answer's position in each.

::

    context tokens      0 ............................................................ 600
    window 0            [CLS] question [SEP] 0 .......... 365 [SEP]
    window 1            [CLS] question [SEP]      238 .......... 600 [SEP]
                                             |<-128->|  doc_stride
    longest context     ------- window 0 --------|------- window 1 -----

A token in two windows has more context on both sides in one of them. An answer may start only
there.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.squad.questions import Question

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Keys of a batch that the model reads."""
_BY_TOKEN = (*MODEL_INPUTS, "spans", "may_start")
_CHUNK = 1000
"""Questions that are tokenized together."""
_MULTIPLE = 8
"""A batch is padded to a multiple of this length, for which GPUs have faster kernels."""


class _Window(NamedTuple):
    question: int
    ids: NDArray[np.int32]
    types: NDArray[np.int8]
    spans: NDArray[np.int32]
    """Characters of each context token, shape ``(L, 2)``; -1 for other tokens."""
    may_start: NDArray[np.bool_]
    cls: int
    answer: tuple[int, int]
    """First and last token of the answer; twice the CLS token if the window lacks it."""


class Features(Dataset[dict[str, Any]]):
    """Windows of tokens, as a map-style data set for ``data.train`` and ``data.eval``.

    A sample is a dict of tensors: ``input_ids``, ``attention_mask`` and, if the tokenizer marks
    the context, ``token_type_ids``, each of shape ``(max_length,)``, and
    ``start_positions`` and ``end_positions``. The label of a window without the answer is the CLS
    token. ``collate`` removes the padding that no sample of a batch needs. Windows for an
    evaluation also have ``spans``, ``may_start``, ``cls_position`` and ``reference``, which
    ``predict`` reads.

    The tokenizer is only used here; it is not sent to the workers.

    Args:
        questions: Questions, as ``read`` returns them.
        tokenizer: A fast tokenizer, such as that of BERT or ALBERT.
        is_training: True to leave out what only ``predict`` needs.
        max_length: Maximum number of tokens in a window.
        doc_stride: Number of context tokens that two neighboring windows share, as in the examples
            of ``transformers``; a third of ``max_length`` if None, which is 128 of 384. (In
            Google's scripts, ``doc_stride`` is the distance between the beginnings of two windows.)
        max_query_length: Longer questions are truncated to this number of tokens.

    Raises:
        RecipeError: If the tokenizer has no character offsets, no CLS token or pads on the left; if
            a window is too long for its model, or too short for the question and the overlap; or
            if an answer is not in its context at the given position.
    """

    def __init__(
        self,
        questions: Iterable[Question],
        tokenizer: Any,
        *,
        is_training: bool = False,
        max_length: int = 384,
        doc_stride: int | None = None,
        max_query_length: int = 64,
    ) -> None:
        self._questions = list(questions)
        self._is_training = is_training
        self._max_length = max_length
        _check_tokenizer(tokenizer, max_length)
        doc_stride = max_length // 3 if doc_stride is None else doc_stride
        windows = [
            window
            for first in range(0, len(self._questions), _CHUNK)
            for window in _cut(
                tokenizer,
                self._questions[first : first + _CHUNK],
                first,
                max_length=max_length,
                doc_stride=doc_stride,
                max_query_length=max_query_length,
            )
        ]
        if not windows:
            raise RecipeError("the list of questions is empty. Give at least one question.")
        self._pad_id = tokenizer.pad_token_id or 0
        self._has_types = any(window.types.any() for window in windows)
        self._question_of = np.array([window.question for window in windows], dtype=np.int32)
        self._cls = np.array([window.cls for window in windows], dtype=np.int32)
        self._answers = np.array([window.answer for window in windows], dtype=np.int32)
        # Without padding: most windows are much shorter than the longest.
        self._bounds = np.cumsum([0, *(len(window.ids) for window in windows)])
        self._ids = np.concatenate([window.ids for window in windows])
        self._types = np.concatenate([window.types for window in windows])
        self._spans = np.concatenate([window.spans for window in windows])
        self._may_start = np.concatenate([window.may_start for window in windows])
        self._warn_about_lost_answers()
        if is_training:
            self._spans, self._may_start = self._spans[:0], self._may_start[:0]
            # Only the number and the ids of the questions are still needed.
            self._questions = [
                replace(question, text="", context="", golds=(), title="")
                for question in self._questions
            ]

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._cls)

    def __repr__(self) -> str:
        return (
            f"Features: {len(self):,} windows of at most {self._max_length} tokens for "
            f"{self.num_questions:,} questions"
        )

    @property
    def num_questions(self) -> int:
        """Number of questions."""
        return len(self._questions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one window."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        part = slice(int(self._bounds[index]), int(self._bounds[index + 1]))
        length = part.stop - part.start
        sample: dict[str, Any] = {
            "input_ids": self._padded(self._ids[part], self._pad_id),
            "attention_mask": self._padded(np.ones(length, np.int64), 0),
        }
        if self._has_types:
            sample["token_type_ids"] = self._padded(self._types[part], 0)
        start, end = self._answers[index].tolist()
        sample["start_positions"] = torch.tensor(start)
        sample["end_positions"] = torch.tensor(end)
        if self._is_training:
            return sample
        question = self._questions[self._question_of[index]]
        return {
            **sample,
            "spans": self._padded(self._spans[part], -1),
            "may_start": self._padded(self._may_start[part], 0).bool(),
            "cls_position": torch.tensor(int(self._cls[index])),
            # Stored as one text, because default_collate cannot join lists of different lengths.
            "reference": json.dumps(
                {
                    "id": question.id,
                    "context": question.context,
                    "golds": [gold.text for gold in question.golds],
                    "may_be_unanswerable": question.may_be_unanswerable,
                }
            ),
        }

    def _padded(self, values: NDArray[Any], fill: int) -> torch.Tensor:
        padded = np.full((self._max_length, *values.shape[1:]), fill, dtype=np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded)

    def _warn_about_lost_answers(self) -> None:
        # Such a question would be trained as one without an answer.
        found = set(self._question_of[self._answers[:, 1] != self._cls].tolist())
        lost = [q for n, q in enumerate(self._questions) if q.golds and n not in found]
        if lost:
            warnings.warn(
                f"{len(lost)} of {len(self._questions)} answers are in no window of "
                f"{self._max_length} tokens as a whole, for example that of question "
                f"{lost[0].id!r}. Training takes them for unanswerable. Increase max_length or "
                "doc_stride, or remove these questions.",
                stacklevel=3,
            )


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join windows into a batch, without the padding that no window needs.

    Returns:
        The samples' keys; tensors by token have shape ``(B, L)`` or ``(B, L, 2)``.
    """
    longest = int(max(sample["attention_mask"].sum() for sample in samples))
    length = -(-longest // _MULTIPLE) * _MULTIPLE
    cut = [
        {key: value[:length] if key in _BY_TOKEN else value for key, value in sample.items()}
        for sample in samples
    ]
    batch: dict[str, Any] = default_collate(cut)
    return batch


def _cut(
    tokenizer: Any,
    questions: Sequence[Question],
    first: int,
    *,
    max_length: int,
    doc_stride: int,
    max_query_length: int,
) -> Iterator[_Window]:
    """Yield the windows of some questions; ``first`` is the number of the first question."""
    texts = [question.text.strip() for question in questions]
    encoding = tokenizer(
        _query_texts(tokenizer, texts, max_length, doc_stride, max_query_length),
        [question.context for question in questions],
        truncation="only_second",
        max_length=max_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    owners = np.array(encoding["overflow_to_sample_mapping"])
    for owner, question in enumerate(questions):
        parts = [_Part.of(encoding, row) for row in np.flatnonzero(owners == owner).tolist()]
        for part, may_start in zip(parts, _with_most_context(parts), strict=True):
            cls = int(np.flatnonzero(part.ids == tokenizer.cls_token_id)[0])
            answer = _answer_tokens(question, part) or (cls, cls)
            spans = np.full((len(part.ids), 2), -1, dtype=np.int32)
            spans[part.first : part.stop] = part.offsets
            allowed = np.zeros(len(part.ids), dtype=np.bool_)
            allowed[part.first : part.stop] = may_start
            yield _Window(first + owner, part.ids, part.types, spans, allowed, cls, answer)


def _query_texts(
    tokenizer: Any, texts: list[str], max_length: int, doc_stride: int, limit: int
) -> list[str]:
    """Return the questions, cut after the maximum number of tokens."""
    encoding = tokenizer(
        texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    longest = min(limit, max(len(ids) for ids in encoding["input_ids"]))
    num_special = tokenizer.num_special_tokens_to_add(pair=True)
    num_left = max_length - longest - num_special
    if num_left <= doc_stride:
        raise RecipeError(
            f"max_length={max_length} leaves {max(0, num_left)} tokens for the context, "
            f"next to a question of {longest} tokens and {num_special} special tokens. That is "
            f"not more than doc_stride={doc_stride}, so windows would not advance. "
            f"Increase max_length to more than {longest + num_special + doc_stride}, or "
            "reduce doc_stride or max_query_length."
        )
    return [
        text[: offsets[limit - 1][1]] if len(offsets) > limit else text
        for text, offsets in zip(texts, encoding["offset_mapping"], strict=True)
    ]


class _Part(NamedTuple):
    # One window, as the tokenizer cut it.
    ids: NDArray[np.int32]
    types: NDArray[np.int8]
    first: int
    """First token of the context."""
    stop: int
    """Token after the context."""
    offsets: NDArray[np.int32]
    """Characters of each context token, shape ``(stop - first, 2)``."""

    @classmethod
    def of(cls, encoding: Any, row: int) -> _Part:
        in_context = np.array([part == 1 for part in encoding.sequence_ids(row)])
        places = np.flatnonzero(in_context)
        first, stop = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        offsets = np.array(encoding["offset_mapping"][row], dtype=np.int32)[first:stop]
        return cls(
            np.array(encoding["input_ids"][row], dtype=np.int32),
            np.array(encoding["token_type_ids"][row], dtype=np.int8),
            first,
            stop,
            offsets.reshape(-1, 2),
        )


def _answer_tokens(question: Question, part: _Part) -> tuple[int, int] | None:
    """Return the first and last token that overlap the answer; None if a part of it is missing."""
    if not question.golds:
        return None
    gold = question.golds[0]
    text = gold.text.strip()
    start = gold.start + len(gold.text) - len(gold.text.lstrip())
    stop = start + len(text)
    if not text or question.context[start:stop] != text:
        raise RecipeError(
            f"question {question.id!r}: the answer {gold.text!r} is not in its context at "
            f"answer_start={gold.start}, where the context has "
            f"{question.context[start : start + max(20, len(text))]!r}. Correct answer_start, or "
            "remove the question."
        )
    offsets = part.offsets
    if not len(offsets) or start < offsets[0, 0] or stop > offsets[-1, 1]:
        return None
    # A token's characters may include the space before it, so overlap is what counts.
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], stop, side="left")) - 1
    return part.first + first, part.first + last


def _with_most_context(parts: Sequence[_Part]) -> list[NDArray[np.bool_]]:
    """Return, for each window, the context tokens that have more context here than elsewhere."""
    lengths = [len(part.offsets) for part in parts]
    # All windows but the last are full, and each begins the same number of tokens after the
    # previous one, at the token with the same characters.
    begins = [0]
    for before, after in itertools.pairwise(parts):
        begins.append(begins[-1] + _shift(before.offsets, after.offsets))
    total = begins[-1] + lengths[-1]
    most = np.full(total, -1.0)
    owner = np.zeros(total, dtype=np.int64)
    for number, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        left = np.arange(length)
        # Google's script prefers the longer window if the context on the shorter side is equal.
        context = np.minimum(left, length - 1 - left) + 0.01 * length
        here = slice(begin, begin + length)
        is_better = context > most[here]
        owner[here] = np.where(is_better, number, owner[here])
        most[here] = np.where(is_better, context, most[here])
    return [
        owner[begin : begin + length] == number
        for number, (begin, length) in enumerate(zip(begins, lengths, strict=True))
    ]


def _shift(before: NDArray[np.int32], after: NDArray[np.int32]) -> int:
    """Return the token of ``before`` at which ``after`` begins."""
    first = int(np.searchsorted(before[:, 0], after[0, 0], side="left"))
    # Several tokens may share a character, such as the bytes of one emoji.
    for shift in range(first, len(before)):
        if np.array_equal(before[shift:], after[: len(before) - shift]):
            return shift
    return len(before)


def _check_tokenizer(tokenizer: Any, max_length: int) -> None:
    name = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise RecipeError(
            f"{name} reports no character offsets, so answers cannot be found. Use a fast "
            "tokenizer, for example AutoTokenizer.from_pretrained(...)."
        )
    if tokenizer.cls_token_id is None:
        raise RecipeError(
            f"{name} has no CLS token, which stands for 'no answer'. Set its cls_token, or use the "
            "tokenizer of a model such as BERT or ALBERT."
        )
    if tokenizer.padding_side != "right":
        raise RecipeError(
            f"{name} pads on the {tokenizer.padding_side}, where the question would follow the "
            "context. Use a model that pads on the right."
        )
    if max_length > tokenizer.model_max_length:
        raise RecipeError(
            f"max_length={max_length} exceeds the {tokenizer.model_max_length} tokens that the "
            f"model of {name} accepts. Longer contexts are cut into overlapping windows: set "
            f"max_length to at most {tokenizer.model_max_length}."
        )
