"""Small PNGs for tests."""

from __future__ import annotations

import struct
import zlib


def png(width: int = 2, height: int = 3, *, shade: int = 0, padding: int = 0) -> bytes:
    """Return a gray picture; ``padding`` bytes of an ancillary chunk make it larger."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = bytes([0, *[shade] * width]) * height if width * height < 10_000 else b""
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    if padding:
        chunks.insert(1, (b"teSt", bytes(padding)))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
