from __future__ import annotations

import os
from pathlib import Path

import pytest

from etrain_jupyter.notebook.job.run_store import new_job_id
from etrain_jupyter.untrusted import (
    check_job_id,
    is_job_id,
    open_regular,
    plain_line,
    plain_text,
    read_regular,
)


@pytest.mark.parametrize("name", ["digits", "../../etc", "x" * 99, "…", "a.b_c", "-rf", "1"])
def test_ids_that_are_given_out_are_ids(name: str) -> None:
    assert is_job_id(new_job_id(name))


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "..", "../x", "a/b", "a b", "-a", ".a", "a\n", "a\nopen('x','w')", "a\x00", "ä"),
        *("%etrain", "a;b", "<b>", "x" * 65, 3, None, ["a"]),
    ],
)
def test_what_could_be_a_path_a_flag_or_code_is_no_id(text: object) -> None:
    """Review S4."""
    assert not is_job_id(text)
    if isinstance(text, str):
        with pytest.raises(ValueError, match="is not the id of a job"):
            check_job_id(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]8;;http://x\x07", "\\x1b[2J\\x1b]8;;http://x\\x07"),
        ("50%\r100%", "50%\\r100%"),
        ("safe\u202etxt.exe", "safe\\u202etxt.exe"),
        ("\x9b31m", "\\x9b31m"),
        ("bad \udcff name", "bad \\udcff name"),
        ("lines\nand\ttabs, ä, 你, 🙂", "lines\nand\ttabs, ä, 你, 🙂"),
    ],
)
def test_text_for_a_terminal_is_shown_and_not_obeyed(text: str, shown: str) -> None:
    """Review S4."""
    assert plain_text(text) == shown
    shown.encode()


def test_a_line_is_one_line_and_not_longer_than_asked_for() -> None:
    assert plain_line("a\nb") == "a\\nb"
    assert len(plain_line("x" * 10**6)) == 200


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    file, pipe, link = tmp_path / "file", tmp_path / "pipe", tmp_path / "link"
    file.write_bytes(b"12345")
    os.mkfifo(pipe)
    link.symlink_to(file)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    assert read_regular(file) == read_regular(file, most_bytes=5) == b"12345"
    assert read_regular(link, follow=True) == b"12345"
    refused = {pipe: "not a regular", tmp_path: "not a regular", link: "it is a link"}
    for path, words in refused.items():
        with pytest.raises(OSError, match=words):
            open_regular(path)
    for follow in (False, True):
        with pytest.raises(OSError, match=r"link|symbolic"):
            open_regular(tmp_path / "loop", follow=follow)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(file, most_bytes=4)
