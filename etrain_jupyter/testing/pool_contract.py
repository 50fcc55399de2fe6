"""Contract suite for pools: subclass ``PoolContract`` and provide a factory.

::

    class TestMyPool(PoolContract):
        @pytest.fixture
        def make_pool(self, tmp_path):
            return lambda: MyPool(state=tmp_path)

Each call returns a new object, as in another process of the same user. The suite shuts the cluster
down after each test and checks that nothing is left behind.

A pool that only connects to an existing cluster sets ``starts_nodes`` and ``owns_cluster`` to False
and overrides ``bring_nodes``. The same tests then check that the pool neither replaces nor ends
what it has not started.
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
    """Timeout for a node to appear or disappear, in seconds."""

    starts_nodes = True
    """True if the pool starts nodes itself; False if the user or another system starts them."""

    owns_cluster = True
    """True if ``down`` ends the cluster; False if the cluster existed before ``up``."""

    @pytest.fixture
    def make_pool(self) -> Callable[[], Pool]:
        """Return the factory of pool objects. Override it."""
        raise NotImplementedError("override the fixture make_pool")

    @pytest.fixture
    def pool(self, make_pool: Callable[[], Pool]) -> Iterator[Pool]:
        """Provide a pool that is up, and shut it down afterwards."""
        pool = make_pool()
        pool.up()
        yield pool
        # `down` returns what it could not end or delete.
        assert not pool.down(timeout_s=self.patience_s)

    def bring_nodes(self, pool: Pool, count: int) -> None:
        """Start ``count`` nodes. Override it if ``starts_nodes`` is False."""
        assert self.starts_nodes, "override bring_nodes"
        pool.want(count, reason="contract")

    def test_up_again_finds_the_same_cluster(
        self, pool: Pool, make_pool: Callable[[], Pool]
    ) -> None:
        """A kernel that starts later joins the cluster."""
        assert pool.up() == make_pool().up()

    def test_two_processes_that_start_at_once_get_the_same_cluster(
        self, make_pool: Callable[[], Pool]
    ) -> None:
        """Two kernels whose first cells run at the same time share one cluster."""
        pools = [make_pool(), make_pool()]
        try:
            with ThreadPoolExecutor(2) as threads:
                first, second = threads.map(lambda pool: pool.up(), pools)
            assert first == second
        finally:
            assert not pools[0].down(timeout_s=self.patience_s)

    def test_released_node_leaves_and_is_replaced_under_a_new_id(self, pool: Pool) -> None:
        """A pool that starts nodes replaces a released one; ids are never reused."""
        self.bring_nodes(pool, 2)
        first, second = self.await_nodes(pool, lambda nodes: _num_running(nodes) == 2)

        pool.release(first.id, drain_s=5.0)
        left = 2 if self.starts_nodes else 1
        after = self.await_nodes(
            pool,
            lambda nodes: (
                _num_running(nodes) == left and first.id not in {node.id for node in nodes}
            ),
        )
        if not self.starts_nodes:
            self.bring_nodes(pool, 1)
            after = self.await_nodes(pool, lambda nodes: _num_running(nodes) == 2)

        # The other node stayed, and the new one has a new id.
        assert second.id in {node.id for node in after}
        assert {first.id, second.id} < {first.id, *(node.id for node in after)}

    def test_want_does_not_wait_for_the_nodes(self, pool: Pool) -> None:
        """``want`` returns at once; nodes appear later."""
        begin = time.monotonic()
        pool.want(1, reason="contract")

        # A machine needs far longer to boot. A local pool may have started the node already.
        assert time.monotonic() - begin < 2.0
        assert len(pool.nodes()) <= 1

    def test_release_of_an_unknown_node_changes_nothing(self, pool: Pool) -> None:
        """The node may have ended just before the call."""
        pool.release("no-such-node", drain_s=0.0)

        assert pool.nodes() == []

    def test_price_is_known_before_anything_is_started(self, pool: Pool) -> None:
        """``price`` starts no node."""
        assert pool.price(2).strip()
        assert pool.nodes() == []

    def test_cost_without_nodes_is_zero(self, pool: Pool) -> None:
        """Without nodes there are no costs."""
        cost = pool.cost()

        assert cost.spent_usd == 0.0
        assert cost.on_demand_usd == 0.0

    def test_down_in_another_process_ends_the_cluster_and_up_starts_a_new_one(
        self, pool: Pool, make_pool: Callable[[], Pool]
    ) -> None:
        """Another process of the user can end the cluster, at any time and repeatedly."""
        old = pool.up()
        self.bring_nodes(pool, 1)

        assert make_pool().down(timeout_s=self.patience_s) == Leftovers()
        assert make_pool().down(timeout_s=self.patience_s) == Leftovers()
        again = pool.up()
        assert (again.cluster_id != old.cluster_id) == self.owns_cluster
        # A cluster that the pool does not own keeps its nodes, which must appear again.
        if not self.owns_cluster:
            self.await_nodes(pool, lambda nodes: _num_running(nodes) == 1)

    def await_nodes(self, pool: Pool, condition: Callable[[list[Node]], bool]) -> list[Node]:
        """Wait for a condition on the nodes and return them; fail on timeout."""
        deadline = time.monotonic() + self.patience_s
        while not condition(nodes := pool.nodes()):
            assert time.monotonic() < deadline, f"still {nodes} after {self.patience_s:g} s"
            time.sleep(0.05)
        return nodes


def _num_running(nodes: list[Node]) -> int:
    return sum(node.state == "running" for node in nodes)
