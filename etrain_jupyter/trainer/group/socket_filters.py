"""Classic BPF packet filters for sockets; attaching one needs no privileges."""

from __future__ import annotations

import ctypes
import socket
import struct

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_NOTHING = [(0x06, 0, 0, 0)]  # ret #0
_ONLY_A_NUMBER = [  # no end of stream, and no more than 8 bytes in a packet
    (0x30, 0, 0, 13),  # ldb [13]: the flags of the TCP header
    (0x45, 8, 0, 5),  # jset #FIN|RST, drop (jumps count from the next instruction)
    (0x30, 0, 0, 12),  # ldb [12]: the length of the header, in words, times 16
    (0x74, 0, 0, 4),  # rsh #4
    (0x64, 0, 0, 2),  # lsh #2
    (0x07, 0, 0, 0),  # tax
    (0x80, 0, 0, 0),  # ld #len
    (0x1C, 0, 0, 0),  # sub x
    (0x25, 1, 0, 8),  # jgt #8, drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
    (0x06, 0, 0, 0),  # drop
]


def drop_everything(listener: socket.socket) -> None:
    """Make a listener unreachable; already accepted connections are not affected."""
    _attach(listener, _NOTHING)


def pass_only_a_number(listener: socket.socket) -> None:
    """Let this listener's connections receive at most 8 bytes per packet, and no end of stream."""
    _attach(listener, _ONLY_A_NUMBER)


def detach_filter(connection: socket.socket) -> None:
    """Remove the filter."""
    connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _attach(to: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HP", len(program), ctypes.addressof(code))
    to.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
