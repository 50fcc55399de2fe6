"""Fields that most steps and reports in the tests do not need."""

from __future__ import annotations

from typing import Any

NOTHING_ELSE: dict[str, Any] = {
    **dict.fromkeys(("evaluation_s", "checkpoint_s", "wait_s", "metrics_s", "cpu_s"), 0.0),
    "core_wait_s": None,
}
PLAIN_STEP: dict[str, Any] = {
    **{"ranks_agree": True, "skipped": False},
    **dict.fromkeys(("data_s", "compute_s", "communication_s", "optimizer_s"), 0.0),
}
