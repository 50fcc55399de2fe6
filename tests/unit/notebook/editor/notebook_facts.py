"""Facts of a notebook without a kernel, with fixed answers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.notebook.editor.completion import complete
from etrain_jupyter.notebook.editor.offers import Completion, Offers


class Net:
    """Looks like an nn.Module."""

    def __init__(self, hidden: int = 8) -> None: ...

    def forward(self) -> None: ...

    def state_dict(self) -> None: ...


class Wide(Net):
    """A model whose constructor needs an argument."""

    def __init__(self, width: int) -> None: ...


class Samples:
    """Looks like a data set; its length must not be read, which would run user code."""

    def __len__(self) -> int:
        raise AssertionError("an editor must not run this")

    def __getitem__(self, place: int) -> int:
        raise AssertionError("an editor must not run this")


class Greedy:
    """Reading any attribute runs user code."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"an editor must not ask for {name}")


def accuracy(output: Any, target: Any) -> Any: ...


def num_tokens(batch: Any) -> float:
    return 1.0


def make_optimizer(parameters: Any) -> Any: ...


def make_data(size: int) -> Any: ...


NAMES: dict[str, Any] = {
    "Net": Net,
    "Wide": Wide,
    "accuracy": accuracy,
    "num_tokens": num_tokens,
    "make_optimizer": make_optimizer,
    "make_data": make_data,
    "train_set": Samples(),
    "greedy": Greedy(),
    "base_seed": 3,
    "title": "a text",
    "functools": functools,
    "operator": operator,
    "_hidden": Net,
}


@dataclass
class NotebookFacts:
    """Answers immediately, and records the expressions that were completed."""

    names: Mapping[str, Any] = field(default_factory=lambda: NAMES)
    asked: list[str] = field(default_factory=list)

    def jobs(self) -> Sequence[str]:
        return ["digits", "faces", "digits-0a1b2c3d", "faces-4e5f6a7b"]

    def pools(self) -> Sequence[str]:
        return ["local", "moon"]

    def clusters(self) -> Sequence[str]:
        return ["c1", "c2"]

    def complete_python(self, code: str) -> Offers:
        """Complete attributes of ``operator`` or the notebook's names."""
        self.asked.append(code)
        begun = code[max(map(code.rfind, "(. ")) + 1 :]
        words = dir(operator) if "operator." in code else self.names
        items = [Completion(w, "variable") for w in words if w.startswith(begun)]
        return Offers(len(code) - len(begun), tuple(items))


def offered(marked: str, facts: NotebookFacts | None = None) -> list[str] | None:
    """Return the completions at the ``|`` of a text as whole words."""
    cursor = marked.index("|")
    text = marked[:cursor] + marked[cursor + 1 :]
    found = complete(text, cursor, facts or NotebookFacts())
    if found is None:
        return None
    assert found.start <= cursor
    line = max(text.rfind("\n", 0, found.start), text.rfind(" ", 0, found.start)) + 1
    assert all(offer.text for offer in found.items)
    return [text[line : found.start] + offer.text for offer in found.items]
