"""Wrong cells and exactly what each prints: line 1 is the magic, the body begins on line 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.config import check_references, parse_cell
from etrain_jupyter.errors import ConfigError

MAGIC = "%%etrain distributed --name digits"
GOOD = "model: Net()\ndata: {train: train_set}\nloss: loss\n"
EVALUATED = (
    "model: Net()\ndata: {train: train_set, eval: train_set}\nloss: loss\n"
    "metrics: {accuracy: loss}\n"
)


class Net:
    def __init__(self, hidden: int = 128) -> None:
        self.hidden = hidden

    def forward(self, x: Any) -> Any:
        return x

    def state_dict(self) -> dict[str, Any]:
        return {}


def loss(output: Any, target: Any) -> Any:
    return output - target


NOTEBOOK: dict[str, Any] = {
    "Net": Net,
    "loss": loss,
    "train_set": [(1, 2)],
    "base_seed": 3,
    "nothing": None,
    "empty": [],
    "number": 3,
    "math": math,
}


def check(body: str) -> None:
    job = parse_cell(body, namespace=NOTEBOOK, first_line=MAGIC)
    check_references(job.config, job.namespace(NOTEBOOK), source=job.source)


def printed(body: str) -> tuple[str, ConfigError]:
    with pytest.raises(ConfigError) as caught:
        check(body)
    return "\n".join(caught.value.render()), caught.value


def read_cells() -> Iterator[Any]:
    """Yield the cells of ``wrong_cells.txt`` and what they print."""
    text = Path(__file__).with_name("wrong_cells.txt").read_text(encoding="utf-8")
    for block in text.split("\n### ")[1:]:
        name, *lines = block.rstrip("\n").split("\n")
        end = next(i for i, line in enumerate(lines) if line.startswith("etrain: "))
        bases = {"GOOD": GOOD, "EVALUATED": EVALUATED}
        body = "".join(bases.get(line, f"{line}\n") for line in lines[:end])
        yield pytest.param(body, "\n".join(lines[end:]), id=name)


@pytest.mark.parametrize(("body", "expected"), list(read_cells()))
def test_wrong_cell_prints_the_expected_error(body: str, expected: str) -> None:
    assert printed(body)[0] == expected


@pytest.mark.parametrize("line", ["", "step: loss", "weight: loss"])
def test_a_cell_without_loss_is_a_job(line: str) -> None:
    parse_cell(f"model: Net()\ndata: {{train: train_set}}\n{line}\n", namespace=NOTEBOOK)


@pytest.mark.parametrize(
    "line",
    [
        "compile: false",
        "reproducible: false",
        "pool: local",
        "scaling: null",
        "schedule: null",
        "checkpoint: {every: auto}",
    ],
)
def test_what_asks_for_nothing_more_than_the_default_passes(line: str) -> None:
    parse_cell(GOOD + line + "\n", namespace=NOTEBOOK)
