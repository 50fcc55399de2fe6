"""Records between a supervisor and a fork server.

They carry fork requests, and report process starts and exits. They do not use the channel, because
descriptors are sent with them. One packet is one record.
"""

from __future__ import annotations

import enum
import struct

RECORD = struct.Struct("!Bii")
"""Kind, process id, and exit status or error number."""

NUM_FDS = 4
"""Descriptors of a fork request: channel, progress page, stdout, stderr."""


class Kind(enum.IntEnum):
    """Kind of a record."""

    IMPORT = 1
    """Request: import torch, and the modules whose names follow, separated by spaces."""
    READY = 2
    """The server has imported torch and is able to fork."""
    FORK = 3
    """Request: fork a trainer with these descriptors. Its environment variables follow, as JSON."""
    FORKED = 4
    """The process runs. Its pidfd is sent with the record."""
    FAILED = 5
    """The fork failed, with this error number."""
    EXITED = 6
    """The process has exited with this status, negative for a signal as in ``subprocess``."""
