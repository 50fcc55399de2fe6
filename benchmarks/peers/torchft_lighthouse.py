"""torchft's lighthouse, which forms the quorums: ``FILE`` gets its address."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

HEARTBEAT_TIMEOUT_MS = 1000
"""How long a dead replica counts as alive; its default is 5000."""
JOIN_TIMEOUT_MS = 1000
"""How long a quorum waits for those that live but have not asked; its default is 60000."""
QUORUM_TICK_MS = 100


def main() -> None:
    """Serve until the signal to end."""
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
