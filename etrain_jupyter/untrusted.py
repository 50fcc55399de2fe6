"""Checks for untrusted input: files, job ids, and text for the screen.

Another user may have written the run store, the bucket or the working folder. Reading from them
must not block forever, exhaust memory, follow a link out of the folder, or print control sequences
that a terminal would execute. The module does not import anything from this package, and raises
only ``OSError`` and ``ValueError``.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Pattern of job ids, which are used as a path component and as a word on a command line.

Ids from ``new_job_id`` match it. The front end has the same pattern in ``protocol.ts``.
"""

_CONTROL = re.compile(
    # C0 except tab and newline, DEL and C1; line and paragraph separators; bidirectional controls;
    # surrogates, which cannot be encoded.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def is_job_id(text: object) -> bool:
    """Return True if this is a valid job id.

    >>> is_job_id("digits-00c0ffee"), is_job_id("../digits"), is_job_id("a b"), is_job_id(".a")
    (True, False, False, False)
    """
    return isinstance(text, str) and JOB_ID.fullmatch(text) is not None


def check_job_id(text: str) -> str:
    """Return a job id unchanged. Call it before the id becomes part of a path.

    Raises:
        ValueError: If it is not a valid job id.
    """
    if not is_job_id(text):
        raise ValueError(f"{ascii(text)[:100]} is not a valid job id")
    return text


def plain_text(text: str) -> str:
    r"""Escape control characters other than newlines and tabs, so that a terminal displays them.

    >>> plain_text("\x1b]0;title\x07 loss 1.5\n")
    '\\x1b]0;title\\x07 loss 1.5\n'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def plain_line(text: str, max_length: int = 200) -> str:
    r"""Return text as one line of at most ``max_length`` characters, without control characters.

    >>> plain_line("a\nb" + "c" * 10, max_length=6)
    'a\\nbc…'
    """
    # Truncate first, because the text may be huge. One extra character shows whether anything was
    # cut off.
    line = plain_text(text[: max_length + 1]).replace("\n", "\\n").replace("\t", " ")
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def open_regular(path: str | os.PathLike[str], *, follow: bool = False) -> io.BufferedReader:
    """Open a regular file for reading. Reading a named pipe or device could block forever.

    Args:
        path: The file.
        follow: Accept a symbolic link as the last component of the path. Use this only for folders
            to which no other user can write.

    Raises:
        OSError: If it does not exist or is not a regular file.
    """
    # O_NONBLOCK: opening a named pipe without a writer would block before fstat can reject it.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as exc:
        if exc.errno == errno.ELOOP and Path(path).is_symlink() and not follow:
            message = "it is a symbolic link, which is not followed"
            raise OSError(errno.ELOOP, message, str(path)) from exc
        raise
    try:
        # Check the open file, not the path, which another user may replace in between.
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(
    path: str | os.PathLike[str], *, most_bytes: int | None = None, follow: bool = False
) -> bytes:
    """Return the bytes of a regular file; see ``open_regular``.

    Raises:
        OSError: If it cannot be read or is larger than ``most_bytes``.
    """
    with open_regular(path, follow=follow) as file:
        # Limit the read instead of checking the size first, because the file may be growing.
        data = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
    return data


def create_file(path: Path) -> io.BufferedWriter:
    """Create a file where others may write; a link or file of that name is removed, not followed.

    Raises:
        OSError: If it cannot be created.
    """
    path.unlink(missing_ok=True)
    return path.open("xb")


def is_private_folder(path: Path) -> bool:
    """Return True if this user owns the folder and no other user can write to it."""
    try:
        # lstat: a symbolic link could point to a folder that another user prepared.
        status = path.lstat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_closed


class FolderState(NamedTuple):
    """Identity of a folder, and what determines who can write to it."""

    inode: int
    writers: frozenset[str]
    """The owner, and whether the folder is a link or writable by the group or by others."""

    def may_be_planted(self, before: FolderState) -> bool:
        """Return True if another user may have put this folder in the place of ``before``."""
        # Compare with ``before``, because some disks show every folder as writable by others, or
        # change the inode of a folder that was not replaced.
        return self.inode != before.inode and not self.writers <= before.writers


def folder_state(path: Path) -> FolderState | None:
    """Return the state of a folder, or of a link to one; None if it does not exist."""
    try:
        status = path.lstat()
    except (OSError, ValueError):  # ValueError: a null character in another user's record
        return None
    bits = {"group": stat.S_IWGRP, "others": stat.S_IWOTH}
    writers = {who for who, bit in bits.items() if status.st_mode & bit}
    if stat.S_ISLNK(status.st_mode):
        writers = {"link"}
    return FolderState(status.st_ino, frozenset({f"owner {status.st_uid}", *writers}))


def without_link(folder: Path) -> Path:
    """Return the folder to which a link of the user points; ``is_private_folder`` refuses links."""
    return folder.resolve() if folder.is_symlink() else folder


def make_private(folder: Path) -> None:
    """Create a folder to which only this user has access.

    Raises:
        OSError: If it exists and is a link, belongs to another user or is writable by others, who
            could have planted data or links in it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not is_private_folder(folder):
            message = "another user may have prepared it: it is not a folder of this user alone"
            raise PermissionError(errno.EACCES, message) from None
