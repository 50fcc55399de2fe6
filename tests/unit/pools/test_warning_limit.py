"""Warnings are rate-limited by key, whatever their text."""

from __future__ import annotations

import pytest

from etrain_jupyter.plugins.ec2.head.fleet_messages import full_price
from etrain_jupyter.plugins.ec2.head.view import Rules
from etrain_jupyter.pools import warning_limit
from etrain_jupyter.pools.warning_limit import REPEAT_S, RateLimitedWarnings


def test_warning_with_changing_figures_is_sent_once_in_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1_000_000.0]
    monkeypatch.setattr(warning_limit.time, "time", lambda: now[0])
    sent: list[str] = []
    warnings = RateLimitedWarnings(sent.append)
    rules = Rules(cluster_id="c", max_workers=4)

    for second in range(int(REPEAT_S) + 1):
        now[0] = 1_000_000.0 + second
        warnings.warn("full price", full_price(rules, "g6.xlarge", 1, float(second)))
    assert warnings.warn("lease", "the lease cannot be renewed")

    assert [text.partition(":")[0] for text in sent] == [
        "EC2 has had no spot capacity for 0 s",
        "EC2 has had no spot capacity for 600 s",
        "the lease cannot be renewed",
    ]
