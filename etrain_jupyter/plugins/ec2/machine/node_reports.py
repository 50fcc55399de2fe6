"""Report a node's state to S3, as ``nodes/ID.json``, for the cluster's head."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.machine.imds import Identity
from etrain_jupyter.plugins.ec2.machine.redaction import redact
from etrain_jupyter.storage.objects.s3_bucket import Bucket

logger = logging.getLogger("etrain.agent")

PHASES = "ETRAIN_BOOT_PHASES"
"""Environment variable with the path of the file that lists the boot phases."""
CLOSE_S = 2.0
REFUSE_S = 30.0


def read_phases() -> list[Any]:
    """Return the phases of the boot so far, from the installer's file."""
    try:
        phases = json.loads(Path(os.environ[PHASES]).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return []  # the image has its own environment
    return phases if isinstance(phases, list) else []


class NodeReports:
    """Writes the node's state on its own thread, so that S3 does not block the agent."""

    def __init__(self, bucket: Bucket, identity: Identity, fingerprint: dict[str, str]) -> None:
        self._bucket = bucket
        # The phases come from `machine.install`, which has written this object before.
        self._facts = {
            **dataclasses.asdict(identity),
            "fingerprint": fingerprint,
            "phases": read_phases(),
        }
        self._name = f"nodes/{identity.instance_id}.json"
        self._is_refused = False
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="etrain-reports", daemon=True)
        self._thread.start()

    def report(self, state: str, error: str = "") -> None:
        """Write a state (``booting``, ``ready``, ``refused`` or ``ended``), asynchronously."""
        record = {**self._facts, "state": state, "error": redact(error), "at": time.time()}
        self._inbox.put(record)

    def refuse(self, error: str) -> None:
        """Report that the machine cannot be used, and wait until the report is written."""
        self._is_refused = True
        self.report("refused", error)
        # None ends the thread: a later `end` must not overwrite the refusal.
        self._inbox.put(None)
        # The machine powers off next. Without the report, the head would only see that the machine
        # has terminated.
        self._thread.join(REFUSE_S)

    def end(self, why: str) -> None:
        """Report that the machine is turning off, asynchronously."""
        if not self._is_refused:  # keep the refusal, which says why
            self.report("ended", why)
            self._inbox.put(None)

    def close(self) -> None:
        """Wait up to ``CLOSE_S`` seconds until everything is written."""
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (record := self._inbox.get()) is not None:
            try:
                data = json.dumps(record, indent=1).encode()
                self._bucket.put(self._name, data, "the state of this node cannot be written")
            # Reports are only for messages and faster failure detection. The machine works without
            # them.
            except StoreError as exc:
                logger.warning(
                    "the state %r of this node was not written: %s", record["state"], exc
                )
            except Exception:
                logger.exception("the state %r of this node was not written", record["state"])
