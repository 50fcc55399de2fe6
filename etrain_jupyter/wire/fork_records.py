"""Records between a supervisor and its warm spare or the machine's fork server.

They carry fork requests, and process starts and exits. They do not use the channel, because
descriptors are sent with them. One packet is one record.
"""

from __future__ import annotations

import enum
import struct

RECORD = struct.Struct("!Bii")
"""Kind, process id, and exit status or error number."""

NUM_FORK_FDS = 4
"""Descriptors of a request to a spare: channel, progress page, stdout, stderr."""

NUM_SPARE_FDS = 5
"""Descriptors of a request to a fork server: channel, progress page, fork requests, stdout, stderr.
The environment variables of the new spare follow the record, as JSON."""


SPARE_MODULES = "ETRAIN_SPARE_MODULES"
"""Environment variable of a new spare: modules to import, separated by spaces."""

MAX_MODULES_BYTES = 60_000
"""Maximum size of that variable. Linux limits a variable to 128 KiB, and a fork request to about
200 KiB."""


class Kind(enum.IntEnum):
    """Kind of a record."""

    READY = 1
    """The spare is able to fork."""
    FORK = 2
    """Request: fork a trainer, or a spare, with these descriptors."""
    FORKED = 3
    """The process runs. Its pidfd is sent with the record."""
    FAILED = 4
    """The fork failed, with this error number."""
    EXITED = 5
    """The process has exited with this status, negative for a signal as in ``subprocess``."""
