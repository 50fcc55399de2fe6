"""Collect the values that each rank of a generation publishes to connect."""

from __future__ import annotations

from collections.abc import Sequence

from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.rank_values import CONNECTIONS, pack_values, sum_digests


class Rendezvous:
    """Collect ``RankKey`` reports until every rank of the generation has sent its own.

    ::

        rank 0   RankKey ──▶                            ◀── RankKeys: the values of ranks 0, 1, 2
        rank 1         RankKey ──▶                      ◀── the same
        rank 2                          RankKey ──▶     ◀── the same
    """

    def __init__(self) -> None:
        self._generation = 0
        self._values: dict[str, dict[str, bytes]] = {}  # by topic and trainer; incomplete topics

    def take(self, report: m.RankKey, ranks: Sequence[str]) -> m.RankKeys | None:
        """Keep a rank's value.

        Args:
            report: The report, of the current generation.
            ranks: Trainers of the current generation in rank order.

        Returns:
            The message to send to each rank, without a trainer; None while a value is missing.
        """
        # An aborted generation may leave incomplete topics behind.
        if report.generation != self._generation:
            self._generation, self._values = report.generation, {}
        values = self._values.setdefault(report.topic, {})
        values[report.trainer] = report.value
        if len(values) < len(ranks) or any(trainer not in values for trainer in ranks):
            return None
        del self._values[report.topic]
        in_order = [values[trainer] for trainer in ranks]
        if report.topic == CONNECTIONS:
            in_order = sum_digests(in_order)
        packed = pack_values(in_order)
        return m.RankKeys(generation=report.generation, topic=report.topic, values=packed)
