"""Entry point of the process that runs ``eval.score``.

``python -m etrain_jupyter.trainer.scoring.score_main PARENT BUNDLE RECORDS NUM_BYTES RESULT``: the
process ID of the trainer, three descriptors, and the size of the records. The process writes its
outcome to the third descriptor. It ends with the trainer, whatever ends that.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.process.parent_pipe import die_with_parent
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.records import unpack_all

NICENESS = 5
"""Training goes first where the processes compete for a core."""


def main() -> None:
    """Score the records and write the outcome."""
    parent, bundle_fd, records_fd, num_bytes, result_fd = map(int, sys.argv[1:])
    die_with_parent(parent)
    os.nice(NICENESS)
    outcome = run(bundle_fd, records_fd, num_bytes)
    with os.fdopen(result_fd, "w") as result:
        json.dump(outcome, result)


def run(bundle_fd: int, records_fd: int, num_bytes: int) -> dict[str, Any]:
    """Return ``{"scores": ...}``, or ``{"error": ..., "traceback": ...}``."""
    bundle: OpenBundle | None = None
    try:
        bundle = open_bundle(Path(f"/dev/fd/{bundle_fd}"))
        bundle.install_sources()
        score = bundle.evaluate("eval.score")
        with os.fdopen(records_fd, "rb") as file:
            file.seek(0)
            records = list(unpack_all(file, num_bytes))
        return {"scores": numbers_of(score(records))}
    except BaseException as exc:
        text = bundle.format_user_traceback(exc) if bundle is not None else ""
        if isinstance(exc, WorkloadError):
            return {"error": str(exc), "traceback": ""}
        error = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(": ")
        return {"error": f"eval.score raised {error}", "traceback": text}


def numbers_of(returned: Any) -> dict[str, float]:
    """Return the scores as plain numbers.

    Raises:
        WorkloadError: If ``score`` returned something other than ``{name: number}``.
    """
    if not isinstance(returned, Mapping) or not returned:
        raise WorkloadError(
            f"eval.score returned {reprlib.repr(returned)}, a {type(returned).__name__}. Return a "
            'dict of numbers, for example {"f1": 0.87}.'
        )
    found = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not name.strip():
            raise WorkloadError(
                f"eval.score returned a value named {name!r}. Names must be non-empty text."
            )
        plain = value
        if hasattr(value, "item"):  # a NumPy scalar, or a tensor of one element
            with contextlib.suppress(ValueError, RuntimeError):
                plain = value.item()
        if not isinstance(plain, numbers.Real):
            raise WorkloadError(
                f"eval.score returned {reprlib.repr(value)} for {name!r}, a "
                f"{type(value).__name__}. Return one number per name."
            )
        found[name] = float(plain)
    return found


if __name__ == "__main__":
    main()
