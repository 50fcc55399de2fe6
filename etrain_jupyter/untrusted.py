"""Checks for what somebody else may have written: files, job ids, text for the screen.

A run store, a bucket and the working folder may be a stranger's. Whoever only looks at them must
not be made to wait for ever, to read without end, to follow a link out of the folder, or to print
what a terminal obeys. This is the bottom layer: it raises ``OSError`` and ``ValueError`` only.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from pathlib import Path

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What ``new_job_id`` makes and a little more: one name in a path, one word on a command line. The
front end has the same pattern in ``protocol.ts``."""

_CONTROL = re.compile(
    # C0 but tab and newline, DEL and C1; line and paragraph separators; what turns the direction of
    # text around; halves of surrogate pairs, which no terminal's encoding has.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def is_job_id(text: object) -> bool:
    """Tell whether this may be the id of a job.

    >>> is_job_id("digits-00c0ffee"), is_job_id("../digits"), is_job_id("a b"), is_job_id(".a")
    (True, False, False, False)
    """
    return isinstance(text, str) and JOB_ID.fullmatch(text) is not None


def check_job_id(text: str) -> str:
    """Return the id of a job, which becomes a name in paths.

    Raises:
        ValueError: If it is none.
    """
    if not is_job_id(text):
        raise ValueError(f"{ascii(text)[:100]} is not the id of a job")
    return text


def plain_text(text: str) -> str:
    r"""Return text that a terminal shows instead of obeying; lines and tabs stay.

    >>> plain_text("\x1b]0;title\x07 loss 1.5\n")
    '\\x1b]0;title\\x07 loss 1.5\n'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def plain_line(text: str, most: int = 200) -> str:
    r"""Return text as one line of at most ``most`` characters.

    >>> plain_line("a\nb" + "c" * 10, most=6)
    'a\\nbcc…'
    """
    line = plain_text(text[: most + 1]).replace("\n", "\\n").replace("\t", " ")
    return line if len(line) <= most else line[: most - 1] + "…"


def open_regular(path: str | os.PathLike[str], *, follow: bool = False) -> io.BufferedReader:
    """Open a file for reading that is a regular one; a named pipe or device would never end.

    Args:
        path: The file.
        follow: Whether its last name may be a link, as in a folder that only its owner writes.

    Raises:
        OSError: If it is not there, or is anything else.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as exc:
        if exc.errno == errno.ELOOP and Path(path).is_symlink() and not follow:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from exc
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(
    path: str | os.PathLike[str], *, most_bytes: int | None = None, follow: bool = False
) -> bytes:
    """Return the bytes of a regular file, see ``open_regular``.

    Raises:
        OSError: If it cannot be read, or holds more than ``most_bytes``.
    """
    with open_regular(path, follow=follow) as file:
        data = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it holds more than {most_bytes:,} bytes", str(path))
    return data
