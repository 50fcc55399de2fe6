"""Run torchft's lighthouse, which forms the quorums, and write its address to ``FILE``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

HEARTBEAT_TIMEOUT_MS = 1000
"""Timeout after which a silent replica is considered dead; torchft's default is 5000."""
JOIN_TIMEOUT_MS = 1000
"""Time that a quorum waits for living replicas that have not requested it; default 60000."""
QUORUM_TICK_MS = 100


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=QUORUM_TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    port = lighthouse.address().rsplit(":", 1)[1]
    path = Path(sys.argv[1])
    path.with_suffix(".tmp").write_text(f"http://127.0.0.1:{port}", encoding="utf-8")
    path.with_suffix(".tmp").replace(path)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
