"""Exhibits: checks of untrusted content, and their files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log.exhibits import (
    MAX_BYTES,
    MAX_CHARACTERS,
    InvalidExhibitError,
    Table,
    encode_table,
    exhibit_key,
    is_exhibit_key,
    parse_exhibit,
    read_exhibit,
    remove_exhibits,
    write_exhibit,
)
from tests.unit.log.pictures import png

KEY = "exhibits/step_00000120/confusion.png"

cells = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.lists(st.text(), min_size=1, max_size=4), st.data())
def test_table_survives_its_encoding(columns: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(*[cells] * len(columns)), max_size=4))
    table = Table(tuple(columns), tuple(rows))

    assert parse_exhibit("table", encode_table(table)) == table


@given(st.sampled_from(["png", "text", "table"]), st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(format: Any, data: bytes) -> None:
    try:
        found = parse_exhibit(format, data)
    except InvalidExhibitError:
        return
    assert format == "text"
    assert found == data.decode()


@pytest.mark.parametrize(
    ("format", "data", "problem"),
    [
        ("png", b"GIF89a" + bytes(40), "is not a PNG"),
        ("png", png()[:20], "is not a PNG"),
        ("png", png().replace(b"IHDR", b"IDAT"), "is not a valid PNG"),
        ("png", png(0, 3), "is not a valid PNG"),
        ("png", png(50_000, 50_000), "has 50,000 x 50,000 pixels; the limit is 16,000,000"),
        ("png", png(padding=MAX_BYTES), "bytes; the limit is 1,000,000"),
        ("text", b"x" * (MAX_CHARACTERS + 1), "has 20,001 characters; the limit is 20,000"),
        ("text", b"\xff", "is not valid UTF-8"),
        ("table", b"{", "is not JSON"),
        ("table", b"[" * 100_000, "is not JSON"),
        ("table", b'{"columns": [], "rows": []}', "has no columns"),
        ("table", b'{"columns": 3, "rows": []}', "is not a table"),
        ("table", b'{"columns": [3], "rows": []}', "a column whose name is not text"),
        ("table", b'{"columns": ["a"], "rows": [[1, 2]]}', "one scalar per column"),
        ("table", b'{"columns": ["a"], "rows": [[[]]]}', "one scalar per column"),
        (
            "table",
            json.dumps({"columns": ["a"], "rows": [[1]] * 201}).encode(),
            "has 201 rows and 1 columns; the limit is 200 rows and 20 columns",
        ),
    ],
)
def test_invalid_content_is_refused_with_its_problem(
    format: Any, data: bytes, problem: str
) -> None:
    with pytest.raises(InvalidExhibitError, match=problem):
        parse_exhibit(format, data)


def test_key_has_the_step_the_name_and_the_suffix_of_the_format() -> None:
    keys = [exhibit_key(step=120, name="a-B_1", format=kind) for kind in ("png", "text", "table")]

    assert [key.removeprefix("exhibits/step_00000120/") for key in keys] == [
        "a-B_1.png",
        "a-B_1.txt",
        "a-B_1.json",
    ]
    assert all(map(is_exhibit_key, keys))


@given(st.integers(), st.text(), st.sampled_from(["png", "text", "table", "html", "../x"]))
def test_key_of_any_values_stays_in_the_folder_or_is_refused(
    step: int, name: str, format: Any
) -> None:
    try:
        key = exhibit_key(step=step, name=name, format=format)
    except InvalidExhibitError:
        return
    assert is_exhibit_key(key)
    assert Path(key).parts[0] == "exhibits"
    assert len(Path(key).parts) == 3


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a.png", "-a", "_a", "a b", "ä", "a" * 65, "a\n", "con:x"]
)
def test_name_that_is_not_a_plain_word_is_refused(name: str) -> None:
    with pytest.raises(InvalidExhibitError, match="has an invalid name"):
        exhibit_key(step=1, name=name, format="png")


def test_file_is_replaced_read_and_removed(tmp_path: Path) -> None:
    write_exhibit(tmp_path, KEY, b"old")
    write_exhibit(tmp_path, KEY, b"new")

    assert read_exhibit(tmp_path, KEY) == b"new"
    assert os.listdir((tmp_path / KEY).parent) == ["confusion.png"]
    assert (tmp_path / KEY).stat().st_mode & 0o777 == 0o600

    remove_exhibits(tmp_path, [KEY, KEY])
    assert not (tmp_path / KEY).parent.exists()
    with pytest.raises(FileNotFoundError):
        read_exhibit(tmp_path, KEY)


@pytest.mark.parametrize("link", ["exhibits", "exhibits/step_00000120", KEY])
def test_symbolic_link_is_not_followed(tmp_path: Path, link: str) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write_exhibit(elsewhere, KEY, b"private")
    (run_dir / link).parent.mkdir(parents=True)
    (run_dir / link).symlink_to(elsewhere / link)

    with pytest.raises(OSError, match="symbolic link"):
        read_exhibit(run_dir, KEY)
    if link != KEY:  # a write replaces the link to a file, and a removal removes the link
        with pytest.raises(OSError, match="symbolic link"):
            write_exhibit(run_dir, KEY, b"new")
    remove_exhibits(run_dir, [KEY])
    assert read_exhibit(elsewhere, KEY) == b"private"


def test_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    write_exhibit(tmp_path, KEY, bytes(MAX_BYTES + 1))

    with pytest.raises(OSError, match="larger than 1,000,000 bytes"):
        read_exhibit(tmp_path, KEY)


@pytest.mark.parametrize("key", ["exhibits/../../x.png", "/etc/passwd", "exhibits/step_1/x.png"])
def test_path_that_is_not_a_key_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="is not the key of an exhibit"):
        read_exhibit(tmp_path, key)
