"""Cut documents into segments of sentences, and write them as shards."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from etrain_jupyter.data.shards import Shards
from etrain_jupyter.data.writing import write_shards
from etrain_jupyter.errors import RecipeError

NUM_SPECIAL = 3
"""CLS, SEP and SEP."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'\u201c\u2018(\[]*[A-Z0-9])")
"""Spaces after a sentence; a quotation mark or a bracket may open the next one."""

Document = str | Sequence[str]
"""A text, or its sentences."""


def read_documents(
    path: str | os.PathLike[str], *, one_per_line: bool = False
) -> Iterator[list[str]]:
    """Yield the sentences of each document in a text file (UTF-8).

    Args:
        path: The file.
        one_per_line: True if each line is a document. Otherwise, documents are separated by blank
            lines, and a line is a sentence or a paragraph.

    Raises:
        RecipeError: If the file cannot be read.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            sentences: list[str] = []
            for line in file:
                if one_per_line or not line.strip():
                    if sentences:
                        yield sentences
                    sentences = []
                sentences.extend(split_sentences(line))
            if sentences:
                yield sentences
    except OSError as exc:
        raise RecipeError(
            f"{os.fspath(path)} cannot be read: {exc.strerror}. Give the path of a text file."
        ) from exc
    except UnicodeDecodeError as exc:
        raise RecipeError(
            f"{os.fspath(path)} is not UTF-8: byte {exc.start} of a part of it is invalid. Convert "
            "it, for example with iconv."
        ) from exc


def split_sentences(text: str) -> list[str]:
    """Split a text after ``.``, ``!`` and ``?`` if an upper-case letter or a digit follows."""
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]


def segments(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    max_length: int = 512,
    short_probability: float = 0.1,
    seed: int = 0,
) -> Iterator[dict[str, list[int]]]:
    """Yield segments of at least two consecutive sentences of a document, without special tokens.

    As in the scripts of BERT and ALBERT, sentences are added until the segment has ``max_length``
    tokens, less the three special tokens. A segment may exceed this length by a part of its last
    sentence, which ``Masking`` truncates. A single sentence at the end of a document is left out.

    Args:
        documents: Texts, or lists of sentences.
        tokenizer: Tokenizer of the model.
        max_length: Maximum number of tokens of a sample, with the special tokens.
        short_probability: Fraction of the segments that get a shorter random length, because models
            are also used on short texts.
        seed: Seed of the random lengths.

    Yields:
        ``tokens``, and ``ends``: the number of tokens up to the end of each sentence.

    Raises:
        RecipeError: If ``max_length`` is less than 5.
    """
    longest = max_length - NUM_SPECIAL
    if longest < 2:
        raise RecipeError(
            f"max_length={max_length} leaves {max(0, longest)} tokens next to the {NUM_SPECIAL} "
            "special tokens, and two sentences need at least 2. Set it to 5 or more."
        )
    for number, document in enumerate(documents):
        # Seeded by the document, so that its segments do not depend on those before it.
        generator = random.Random(f"{seed}/{number}")
        sentences = split_sentences(document) if isinstance(document, str) else list(document)
        if sentences:
            # ``verbose`` would warn about long documents, which need not fit into the model.
            ids = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
            yield from _segments_of([s for s in ids if s], longest, short_probability, generator)


def write_corpus(
    documents: Iterable[Document],
    tokenizer: Any,
    to: str | os.PathLike[str],
    *,
    max_length: int = 512,
    short_probability: float = 0.1,
    seed: int = 0,
    **options: Any,
) -> Shards:
    """Write a corpus as shards, for ``data.train`` with ``Masking`` as ``data.collate``.

    Neither masks nor the order of sentences are stored: ``Masking`` draws new ones in each epoch.

    Args:
        documents: Texts, or lists of sentences, such as ``read_documents`` yields.
        tokenizer: Tokenizer of the model.
        to: An empty folder, or ``s3://bucket/prefix``.
        max_length: See ``segments``.
        short_probability: See ``segments``.
        seed: Seed of the random lengths and of the shuffle.
        options: Options of ``write_shards``, such as ``exist_ok``.

    Raises:
        RecipeError: If ``max_length`` is too small.
        ShardError: If the documents have no segments, or the files cannot be written.
    """
    rows = segments(
        documents, tokenizer, max_length=max_length, short_probability=short_probability, seed=seed
    )
    return write_shards(rows, to, seed=seed, **options)


def _segments_of(
    sentences: list[list[int]], longest: int, short_probability: float, generator: random.Random
) -> Iterator[dict[str, list[int]]]:
    chunk: list[list[int]] = []
    length = 0
    target = _target_length(longest, short_probability, generator)
    for number, sentence in enumerate(sentences):
        chunk.append(sentence)
        length += len(sentence)
        is_last = number == len(sentences) - 1
        if len(chunk) >= 2 and (length >= target or is_last):
            ends = [sum(map(len, chunk[: i + 1])) for i in range(len(chunk))]
            yield {"tokens": [token for part in chunk for token in part], "ends": ends}
            chunk, length = [], 0
            target = _target_length(longest, short_probability, generator)


def _target_length(longest: int, short_probability: float, generator: random.Random) -> int:
    is_short = generator.random() < short_probability
    return generator.randint(2, longest) if is_short else longest
