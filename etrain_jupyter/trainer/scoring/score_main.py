"""Entry point of the process that runs ``eval.score``.

``python -m etrain_jupyter.trainer.scoring.score_main PARENT BUNDLE RECORDS NUM_BYTES RESULT``: the
process ID of the trainer, three descriptors, and the size of the records. The process writes its
outcome to the third descriptor. The process ends when the trainer does, for whatever reason.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgpack

from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.process.entry import die_with_parent
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.exhibits import result_of
from etrain_jupyter.trainer.scoring.records import unpack_all

NICENESS = 5
"""Training has priority where the processes compete for a core."""


def main() -> None:
    """Score the records and write the outcome."""
    parent, bundle_fd, records_fd, num_bytes, result_fd = map(int, sys.argv[1:])
    die_with_parent(parent)
    os.nice(NICENESS)
    outcome = run(bundle_fd, records_fd, num_bytes)
    # msgpack, because exhibits are bytes. A message may contain text that is not valid UTF-8.
    with os.fdopen(result_fd, "wb") as result:
        result.write(msgpack.packb(outcome, unicode_errors="backslashreplace"))


def run(bundle_fd: int, records_fd: int, num_bytes: int) -> dict[str, Any]:
    """Return ``{"scores", "exhibits"}``, or ``{"error", "traceback"}``, for msgpack."""
    bundle: OpenBundle | None = None
    try:
        bundle = open_bundle(os.fdopen(bundle_fd, "rb"))
        bundle.install_sources()
        score = bundle.evaluate("eval.score")
        with os.fdopen(records_fd, "rb") as file:
            file.seek(0)
            records = list(unpack_all(file, num_bytes))
        result = result_of(score(records))
        return {
            "scores": result.scores,
            "exhibits": [
                [exhibit.name, exhibit.format, exhibit.data] for exhibit in result.exhibits
            ],
        }
    except BaseException as exc:
        text = bundle.format_user_traceback(exc) if bundle is not None else ""
        if isinstance(exc, WorkloadError):
            return {"error": str(exc), "traceback": ""}
        error = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(": ")
        return {"error": f"eval.score raised {error}", "traceback": text}


if __name__ == "__main__":
    main()
