"""What every pool must pass: subclass ``PoolContract`` and say how to make a pool object.

::

    class TestMyPool(PoolContract):
        @pytest.fixture
        def make_pool(self, tmp_path):
            return lambda: MyPool(state=tmp_path)

Each call gives a new object, as another process of the same user would make it. The suite takes the
cluster down after each test and sees to it that nothing is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from etrain_jupyter.pools.base import Leftovers, Node, Pool


class PoolContract:
    """The suite."""

    patience_s = 60.0
    """How long a node may take to come or go. Nothing sleeps that long if all is well."""

    @pytest.fixture
    def make_pool(self) -> Callable[[], Pool]:
        """Return what makes a pool object; yours."""
        raise NotImplementedError("override the fixture make_pool")

    @pytest.fixture
    def pool(self, make_pool: Callable[[], Pool]) -> Iterator[Pool]:
        """Give a pool that is up, and end it."""
        pool = make_pool()
        pool.up()
        yield pool
        assert not pool.down(timeout_s=self.patience_s)

    def test_up_again_finds_the_same_cluster(
        self, pool: Pool, make_pool: Callable[[], Pool]
    ) -> None:
        """A kernel that comes later joins the cluster."""
        assert pool.up() == make_pool().up()

    def test_two_that_start_at_once_get_the_same_cluster(
        self, make_pool: Callable[[], Pool]
    ) -> None:
        """Two kernels whose first cells run at the same time share a cluster."""
        pools = [make_pool(), make_pool()]
        try:
            with ThreadPoolExecutor(2) as threads:
                first, second = threads.map(lambda pool: pool.up(), pools)
            assert first == second
        finally:
            assert not pools[0].down(timeout_s=self.patience_s)

    def test_wanted_nodes_come_and_a_released_one_is_replaced(self, pool: Pool) -> None:
        """Demand is met, by nodes whose ids are never used again."""
        pool.want(2, reason="contract")
        first, second = self.await_nodes(pool, lambda nodes: _num_running(nodes) == 2)

        pool.release(first.id, drain_s=5.0)
        after = self.await_nodes(
            pool,
            lambda nodes: _num_running(nodes) == 2 and first.id not in {node.id for node in nodes},
        )

        assert second.id in {node.id for node in after}
        assert {first.id, second.id} < {first.id, *(node.id for node in after)}

    def test_want_does_not_wait_for_the_nodes(self, pool: Pool) -> None:
        """A request is a word, not a wait."""
        begin = time.monotonic()
        pool.want(1, reason="contract")

        assert time.monotonic() - begin < 2.0
        assert len(pool.nodes()) <= 1

    def test_release_of_an_unknown_node_changes_nothing(self, pool: Pool) -> None:
        """It may have gone by itself a moment ago."""
        pool.release("no-such-node", drain_s=0.0)

        assert pool.nodes() == []

    def test_cost_of_nothing_is_nothing(self, pool: Pool) -> None:
        """No node, no bill."""
        cost = pool.cost()

        assert cost.spent_usd == 0.0
        assert cost.on_demand_usd == 0.0

    def test_down_from_elsewhere_ends_everything_and_up_starts_afresh(
        self, pool: Pool, make_pool: Callable[[], Pool]
    ) -> None:
        """Whoever knows the cluster can end it, whatever it is doing, and twice is no error."""
        old = pool.up()
        pool.want(1, reason="contract")

        assert make_pool().down(timeout_s=self.patience_s) == Leftovers()
        assert make_pool().down(timeout_s=self.patience_s) == Leftovers()
        assert pool.up().cluster_id != old.cluster_id

    def await_nodes(self, pool: Pool, is_so: Callable[[list[Node]], bool]) -> list[Node]:
        """Return the nodes as soon as something holds of them; fail if it does not in time."""
        deadline = time.monotonic() + self.patience_s
        while not is_so(nodes := pool.nodes()):
            assert time.monotonic() < deadline, f"still {nodes} after {self.patience_s:g} s"
            time.sleep(0.05)
        return nodes


def _num_running(nodes: list[Node]) -> int:
    return sum(node.state == "running" for node in nodes)
