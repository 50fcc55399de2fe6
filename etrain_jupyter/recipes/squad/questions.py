"""Read SQuAD v1.1 and v2.0."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from etrain_jupyter.errors import RecipeError

HUB_NAMES = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}
"""Names of the official data sets on the Hugging Face hub, by version."""
_SPLITS = {"train": "train", "dev": "validation"}


@dataclass(frozen=True, kw_only=True)
class Gold:
    """An answer that a person gave."""

    text: str
    """Part of the context, verbatim."""
    start: int
    """Position of its first character in the context."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a paragraph."""

    id: str
    text: str
    context: str
    """The paragraph."""
    golds: tuple[Gold, ...]
    """Correct answers; empty if the paragraph has no answer."""
    may_be_unanswerable: bool
    """True in SQuAD v2.0, where "no answer" may be correct."""
    title: str = ""
    """Title of the article."""


def read(source: str | os.PathLike[str] | Mapping[str, Any] | Iterable[Any]) -> list[Question]:
    """Read questions in the official format, or rows of the set on the Hugging Face hub.

    Args:
        source: Path of an official JSON file; its parsed content; its list of articles; or rows
            with ``id``, ``title``, ``context``, ``question`` and ``answers``, such as a Hugging
            Face ``Dataset`` or a list of dicts.

    Returns:
        The questions, in the order of the source. The version is 2.0 if the file says so or if any
        question is marked as impossible or has no answer.

    Raises:
        RecipeError: If the source has another format, no question, or two questions with one id.
    """
    where = "the source"
    if isinstance(source, str | os.PathLike):
        where = os.fspath(source)
        source = _parse(Path(source))
    version = ""
    if isinstance(source, Mapping):
        if "data" not in source:
            keys = ", ".join(map(repr, source)) or "none"
            raise _wrong_format(where, f"a dict with the keys {keys}")
        version = str(source.get("version", ""))
        source = source["data"]
    items = list(cast("Iterable[Any]", source))
    try:
        rows = list(_rows_of(items))
    except (KeyError, TypeError, IndexError) as exc:
        raise _wrong_format(where, f"an item without {exc}") from exc
    if not rows:
        raise RecipeError(f"{where} contains no questions. Check that the file is complete.")
    # The version of any other file, such as a subset, follows from its questions.
    is_v2 = version.endswith("2.0") or any(row.may_be_unanswerable or not row.golds for row in rows)
    questions = [replace(row, may_be_unanswerable=is_v2) for row in rows]
    _check_ids(questions, where)
    return questions


def download(split: str = "train", *, version: str = "2.0") -> list[Question]:
    """Read the official set from the Hugging Face hub, which the ``datasets`` library caches.

    Args:
        split: ``"train"`` or ``"dev"``.
        version: ``"1.1"`` or ``"2.0"``.

    Raises:
        RecipeError: If ``datasets`` is missing, or the hub cannot be reached.
    """
    if split not in _SPLITS or version not in HUB_NAMES:
        raise RecipeError(
            f"SQuAD has no split {split!r} of version {version!r}. Use 'train' or 'dev', and "
            "'1.1' or '2.0'."
        )
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as exc:
        raise RecipeError(
            "squad.download needs the library datasets, which is not installed. Install it: "
            'pip install "etrain-jupyter[recipes]"'
        ) from exc
    try:
        rows = load_dataset(HUB_NAMES[version], split=_SPLITS[split])
    except (OSError, ValueError) as exc:  # requests' and the hub's errors are OSErrors
        raise RecipeError(
            f"{HUB_NAMES[version]} cannot be loaded from the Hugging Face hub: {exc}. Nothing was "
            "read. If this machine has no access to the hub, copy the official JSON file to it "
            f"and use squad.read('{split}-v{version}.json')."
        ) from exc
    return read(rows)


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise RecipeError(
            f"{path} cannot be read: {exc.strerror}. Give the path of an official SQuAD file, or "
            "use squad.download() to load it from the Hugging Face hub."
        ) from exc
    except ValueError as exc:
        raise RecipeError(
            f"{path} is not valid JSON: {exc}. Check that its download is complete."
        ) from exc


def _rows_of(items: Sequence[Any]) -> Iterator[Question]:
    """Yield the questions, each with ``may_be_unanswerable`` as far as its own row shows it."""
    for item in items:
        if isinstance(item, Question):
            yield item
        elif "paragraphs" in item:
            for paragraph in item["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = [(a["text"], a["answer_start"]) for a in question["answers"]]
                    row = _question(question, paragraph["context"], item, answers)
                    yield replace(row, may_be_unanswerable="is_impossible" in question)
        else:
            texts, starts = item["answers"]["text"], item["answers"]["answer_start"]
            yield _question(item, item["context"], item, zip(texts, starts, strict=True))


def _question(
    item: Mapping[str, Any], context: str, article: Mapping[str, Any], answers: Iterable[Any]
) -> Question:
    return Question(
        id=str(item["id"]),
        text=item["question"],
        context=context,
        golds=tuple(Gold(text=text, start=int(start)) for text, start in answers),
        may_be_unanswerable=False,
        title=article.get("title", ""),
    )


def _check_ids(questions: Sequence[Question], where: str) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise RecipeError(
                f"{where} has two questions with the id {question.id!r}, so predictions could not "
                "be assigned to them. Remove one, or give it another id."
            )
        seen.add(question.id)


def _wrong_format(where: str, found: str) -> RecipeError:
    return RecipeError(
        f"{where} is not in SQuAD's format: found {found}. Give an official JSON file, its parsed "
        "content, or rows with id, context, question and answers."
    )
