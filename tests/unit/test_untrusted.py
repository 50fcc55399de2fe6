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
def test_generated_job_ids_are_valid(name: str) -> None:
    assert is_job_id(new_job_id(name))


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "..", "../x", "a/b", "a b", "-a", ".a", "a\n", "a\nopen('x','w')", "a\x00", "ä"),
        *("%etrain", "a;b", "<b>", "x" * 65, 3, None, ["a"]),
    ],
)
def test_paths_flags_and_code_are_not_valid_job_ids(text: object) -> None:
    """Untrusted input must be rejected."""
    assert not is_job_id(text)
    if isinstance(text, str):
        with pytest.raises(ValueError, match="is not a valid job id"):
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
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    """Untrusted input must be rejected."""
    assert plain_text(text) == shown
    shown.encode()


def test_plain_line_is_one_line_of_limited_length() -> None:
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
    refused = {pipe: "not a regular", tmp_path: "not a regular", link: "it is a symbolic link"}
    for path, message in refused.items():
        with pytest.raises(OSError, match=message):
            open_regular(path)
    for follow in (False, True):
        with pytest.raises(OSError, match=r"link|symbolic"):
            open_regular(tmp_path / "loop", follow=follow)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(file, most_bytes=4)
