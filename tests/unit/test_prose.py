"""The vocabulary of docstrings, comments, error messages and documents.

Each pattern is a word that stood in for a standard term, or a construction that makes readers
stop. A limit is what is left of it; lower it when you can, never raise it. To see the places, run
``python -m tests.unit.test_prose PATTERN``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.code_samples import Text, sentences

PACKAGE = Path(__file__).parents[2] / "etrain_jupyter"

# Pattern -> how many sentences may still match it.
LIMITS: dict[str, int] = {
    r"\b(tell|tells|told|telling)\b": 4,
    r"\b(somebody|nobody|whoever|anybody)\b": 0,
    r"\bwhat (there )?(is|was|are)\b": 7,
    r"\b(anew|besides?|befalls?)\b": 0,
    r"\b(is|are|was) no [a-z]+\b": 64,
    r"\bso (many|long)\b": 0,
    r"\bby and by\b|\bas can be had\b|\bcannot be had\b": 0,
    r"\b(stands still|stood still)\b": 0,
    r"\b(go|goes|went|gone) on\b": 0,
    r"\b(done without|do without|let go|lets go)\b": 0,
    r"\bmend(s|ed)?\b|\bspoil(s|ed)?\b": 0,
    r"\b(let|lets) [a-z]+ know\b": 0,
    r"\b(hears?|heard)\b": 0,
    r"\blies (in|at|on|under|beside)\b|\blie (in|at|on|under|beside)\b": 0,
    r"\bsigns? of life\b": 0,
    r"^(What|Which|Whose|Who|Whether|How) ": 22,
}


@pytest.fixture(scope="module")
def prose() -> list[Text]:
    return sentences(PACKAGE)


@pytest.mark.parametrize("pattern", LIMITS)
def test_prose_uses_the_words_of_the_field(pattern: str, prose: list[Text]) -> None:
    found = matches(pattern, prose)

    assert len(found) <= LIMITS[pattern], "\n".join(found[:20])


def matches(pattern: str, prose: list[Text]) -> list[str]:
    """Return the sentences that match, each after its place."""
    flags = 0 if pattern.startswith("^") else re.IGNORECASE
    return [
        f"{sentence['where']}: {sentence['text']}"
        for sentence in prose
        if re.search(pattern, sentence["text"], flags)
    ]


if __name__ == "__main__":
    known = sentences(PACKAGE)
    for wanted in sys.argv[1:] or LIMITS:
        places = matches(wanted, known)
        print(f"{len(places):5} {wanted}")
        if sys.argv[1:]:
            print(*places, sep="\n")
