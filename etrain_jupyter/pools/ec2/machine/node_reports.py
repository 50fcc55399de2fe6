"""What a node says of itself in S3: ``nodes/ID.json``, for whoever launched it to read."""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import threading
import time
from typing import Any

from etrain_jupyter.errors import StoreError
from etrain_jupyter.pools.ec2.machine.redaction import redact
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.worker.imds import Identity

logger = logging.getLogger("etrain.agent")

CLOSE_S = 2.0
REFUSE_S = 30.0


class NodeReports:
    """Writes the node's state on a thread of its own, so that S3 holds nobody up.

    Args:
        bucket: The cluster's objects.
        identity: Which machine it is.
        fingerprint: What is installed on it.
    """

    def __init__(self, bucket: Bucket, identity: Identity, fingerprint: dict[str, str]) -> None:
        self._bucket = bucket
        self._facts = {
            **dataclasses.asdict(identity),
            "fingerprint": fingerprint,
        }
        self._name = f"nodes/{identity.instance_id}.json"
        self._is_refused = False
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="etrain-reports", daemon=True)
        self._thread.start()

    def say(self, state: str, error: str = "") -> None:
        """Write a state: ``booting``, ``ready``, ``refused`` or ``ended``."""
        told = {**self._facts, "state": state, "error": redact(error), "at": time.time()}
        self._inbox.put(told)

    def refuse(self, error: str) -> None:
        """Write that the machine is of no use, and wait until that is written."""
        self._is_refused = True
        self.say("refused", error)
        self._inbox.put(None)
        self._thread.join(REFUSE_S)

    def end(self, why: str) -> None:
        """Write that the machine turns off; does not wait."""
        if not self._is_refused:  # that says more
            self.say("ended", why)
            self._inbox.put(None)

    def close(self) -> None:
        """Wait for a moment until all is written."""
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (told := self._inbox.get()) is not None:
            try:
                data = json.dumps(told, indent=1).encode()
                self._bucket.put(self._name, data, "the state of this node cannot be written")
            except StoreError as exc:
                logger.warning("the state %r of this node was not written: %s", told["state"], exc)
            except Exception:
                logger.exception("the state %r of this node was not written", told["state"])
