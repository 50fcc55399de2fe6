"""Values that ``eval.score`` returns: scores, and figures, texts and tables."""

from __future__ import annotations

import datetime
import json
from typing import Any

import numpy as np
import pytest
import torch

from etrain_jupyter.log.exhibits import MAX_BYTES, Table, parse_exhibit
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.exhibits import ScoreResult, result_of
from tests.unit.log.pictures import png


def only(returned: dict[str, Any]) -> Any:
    """Return the content of the one exhibit."""
    [exhibit] = result_of(returned).exhibits
    return parse_exhibit(exhibit.format, exhibit.data)


def test_numbers_of_numpy_and_torch_are_plain() -> None:
    found = result_of({"a": np.float32(0.5), "b": torch.tensor([2]), "c": True, "d": 3})

    assert found == ScoreResult({"a": 0.5, "b": 2.0, "c": 1.0, "d": 3.0})
    assert {type(value) for value in found.scores.values()} == {float}


def test_scores_and_exhibits_are_separated() -> None:
    found = result_of({"f1": 0.5, "report": "good", "picture": png(), "rows": [{"a": 1}]})

    assert found.scores == {"f1": 0.5}
    assert [(one.name, one.format) for one in found.exhibits] == [
        ("report", "text"),
        ("picture", "png"),
        ("rows", "table"),
    ]


def test_figure_is_drawn_and_closed() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="platform: no matplotlib")
    figure, axes = pyplot.subplots(figsize=(2, 1), dpi=100)
    axes.plot([1, 2])

    data = only({"curve": figure})

    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (200, 100)
    assert pyplot.get_fignums() == []


def test_figure_without_pyplot_is_drawn() -> None:
    module = pytest.importorskip("matplotlib.figure", reason="platform: no matplotlib")

    assert only({"empty": module.Figure(figsize=(1, 1), dpi=50)}).startswith(b"\x89PNG")


def test_table_of_dicts_has_the_columns_of_all_rows() -> None:
    rows = [{"name": "a", "loss": np.float32(0.5)}, {"name": "b", "right": np.bool_(True)}]

    assert only({"worst": rows}) == Table(
        ("name", "loss", "right"), (("a", 0.5, None), ("b", None, True))
    )


def test_table_of_a_data_frame_has_its_index_only_if_that_has_names() -> None:
    pandas = pytest.importorskip("pandas", reason="libraries: pandas is not installed")
    frame = pandas.DataFrame({"n": [1, 2], "when": [pandas.Timestamp("2026-01-02"), pandas.NaT]})

    plain, named = only({"t": frame}), only({"t": frame.set_index(pandas.Index(["x", "y"]))})

    assert plain == Table(("n", "when"), ((1, "2026-01-02T00:00:00"), (2, None)))
    assert named.columns == ("index", "n", "when")
    assert [row[0] for row in named.rows] == ["x", "y"]


def test_cells_that_are_not_finite_and_dates_are_kept() -> None:
    rows = [{"a": float("nan"), "b": float("-inf"), "c": datetime.date(2026, 1, 2)}]
    [exhibit] = result_of({"t": rows}).exhibits

    [[nan, infinite, date]] = json.loads(exhibit.data)["rows"]
    assert np.isnan(nan)
    assert (infinite, date) == (float("-inf"), "2026-01-02")


def test_text_that_utf_8_cannot_encode_is_escaped() -> None:
    assert only({"t": "caf\udce9"}) == "caf\\udce9"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, r"eval.score returned 0.5, a float. Return a dict of numbers"),
        ({}, "eval.score returned {}"),
        ({"f1": torch.ones(2)}, "for 'f1', a Tensor. Return a number .a score., or something"),
        ({"f1": []}, r"eval.score returned \[\] for 'f1', a list"),
        ({"f1": [1, {"a": 1}]}, "for 'f1', a list"),
        ({3: 1.0}, "a value named 3"),
        ({" ": 1.0}, "a value named ' '"),
        ({"a b": "text"}, "the text 'a b' of eval.score has an invalid name. Use at most 64"),
        ({"x": b"GIF89a"}, "the picture 'x' of eval.score is not a PNG"),
        (
            {"x": png(padding=MAX_BYTES)},
            "the picture 'x' of eval.score has 1,000,0.* bytes; the limit is 1,000,000. "
            "Return a smaller picture, for example with a lower dpi",
        ),
        ({"x": "a" * 20_001}, "20,001 characters; the limit is 20,000. Return a shorter text"),
        ({"x": [{"a": 1}] * 201}, "has 201 rows and 1 columns; the limit is .* Return a smaller"),
        ({"x": [{}]}, "the table 'x' of eval.score has no columns"),
        (
            {"x": [{"boxes": [1, 2]}]},
            r"the table 'x' of eval.score has \[1, 2\], a list, in the column 'boxes'",
        ),
        ({"x": "a", "X": "b"}, "names differ only in upper and lower case: X, x"),
        ({f"t{n}": "a" for n in range(17)}, "returned 17 figures, texts and tables with 17 bytes"),
        (
            {f"p{n}": png(padding=900_000) for n in range(5)},
            "5 figures, texts and tables with 4,500,.* the limit for one evaluation is 16 and 4,0",
        ),
    ],
)
def test_anything_else_is_refused_with_the_limit_and_the_remedy(
    returned: Any, message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        result_of(returned)
