"""Source of an ``aws-spot`` cluster's nodes, for the head's event loop.

The loop and the reconcile thread share no lock. Each writes one immutable value, which the other
reads as a whole::

    event loop                                         thread etrain-aws
    want, hold, release, kill, note_notice
      desired = DesiredFleet(...)     ------------->   reads it once per tick
    nodes(), costs()                  <-------------   snapshot = FleetSnapshot(...)
    on_gone, on_warning, on_halt      <-------------   call_soon_threadsafe
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.head.interfaces import HeadFacts
from etrain_jupyter.plugins.ec2.bootstrap import config_of
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.head.reconciler import Reconciler
from etrain_jupyter.plugins.ec2.head.roster import (
    DesiredFleet,
    FleetSnapshot,
    NodeNotice,
    Reports,
)
from etrain_jupyter.plugins.ec2.launch_context import set_up
from etrain_jupyter.plugins.ec2.node_config import node_of
from etrain_jupyter.plugins.ec2.reaping import remove
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.wire.versions import read_fingerprint

logger = logging.getLogger(__name__)

CLOSE_S = 180.0
"""Timeout for removing a cluster's resources; the security group goes last."""


class AwsNodes:
    """Source of nodes on EC2. Only ``start`` and ``close`` block.

    All callbacks run on the event loop that ``start`` ran on.
    """

    replaces_early = True
    trains_after_notice = True

    def __init__(self, facts: HeadFacts) -> None:
        self._facts = facts
        self._dir = facts.cluster
        self._spec = spec = AwsSpotSpec.model_validate(facts.settings.spec)
        is_timed = spec.capacity.policy == "deadline"
        self.finish_by_s: float | None = spec.capacity.finish_by if is_timed else None
        self._clients = Clients(spec)
        self._wanted = 0
        # workers.want is only the initial value, which `hold` replaces. workers.min always applies;
        # see `Reconciler._view`.
        self._min_workers = spec.workers.want if spec.workers.want is not None else spec.workers.min
        self._releasing: dict[str, float] = {}
        self._killing: set[str] = set()
        self._noticed: dict[str, NodeNotice] = {}
        self._reconciler: Reconciler | None = None
        self._has_adopted = False

    async def start(self, scheduler_address: str) -> None:
        """Create what nodes need, adopt existing nodes, take the lease, and start the thread.

        Raises:
            PoolError: If AWS refuses a request.
        """
        config = config_of(
            self._spec,
            self._dir.cluster_id,
            fingerprint=read_fingerprint(),
            supervisor=self._facts.settings.supervisor,
        )
        # Every step finds what a previous head created, so a head that takes over runs the same
        # code as the first one:
        #
        #   set_up       keys, config.json, security group, launch template: find or create
        #   adopt        read ledger and fleet.json, then take the lease: nodes see the new address
        #   first tick   list machines by tag; their workers reconnect meanwhile
        context = await asyncio.to_thread(
            set_up, self._clients, self._spec, self._dir.cluster_id, self._dir.tls, config
        )
        self._reconciler = Reconciler(
            self._spec,
            self._dir.cluster_id,
            self._clients,
            self._dir.path,
            context,
            self._reports(asyncio.get_running_loop()),
        )
        try:
            await asyncio.to_thread(self._reconciler.adopt, scheduler_address)
        except StoreError as exc:
            raise PoolError(f"the lease of the cluster cannot be written: {exc}") from exc
        # From here on capacity() is known, and nodes() is complete after the first tick.
        self._has_adopted = True
        self._update_desired()
        self._reconciler.start()

    # --- desired state ---

    def want(self, count: int, *, reason: str) -> None:
        """Provide ``count`` workers, as far as the spec, EC2's capacity and the budget allow."""
        # Called on every allocation. An unchanged number must not wake the thread, because each
        # tick sends several requests to EC2, which throttles them.
        if count != self._wanted:
            logger.info("%d workers wanted instead of %d: %s", count, self._wanted, reason)
            self._wanted = count
            self._update_desired(wake=True)

    def hold(self, count: int, *, reason: str) -> None:
        """Keep at least ``count`` workers, regardless of the jobs."""
        logger.info("at least %d workers held: %s", count, reason)
        self._min_workers = count
        self._update_desired(wake=True)

    def capacity(self) -> int | None:
        """Return the maximum number of workers; None until existing nodes have been adopted."""
        return self._spec.workers.max if self._has_adopted else None

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Record EC2's notice to a worker's machine, whose replacement may then exceed ``max``."""
        # Notices may arrive in any order, and a rebalance recommendation must not replace an
        # interruption notice.
        known = self._noticed.get(node_of(worker))
        if kind == "rebalance" and (known or self._spec.interruption.on_rebalance == "ignore"):
            return
        self._noticed[node_of(worker)] = NodeNotice(kind=kind, deadline=deadline)
        self._update_desired(wake=True)

    def release(self, worker: str, *, drain_s: float) -> None:
        """Terminate a worker's machine once no job uses it, or after ``drain_s``.

        A machine that EC2 is about to reclaim in its first hour is not terminated, because EC2 does
        not charge for a machine that it reclaims so early.
        """
        # Keep the first deadline, because a repeated release must not postpone the termination.
        self._releasing.setdefault(node_of(worker), time.time() + drain_s)
        self._update_desired(wake=True)

    def kill(self, worker: str) -> None:
        """Terminate a worker's machine now."""
        self._killing.add(node_of(worker))
        self._update_desired(wake=True)

    def reap(self) -> None:
        """Pass the scheduler's state on to the thread; call this about every second."""
        self._update_desired()

    # --- actual state ---

    def nodes(self) -> list[dict[str, Any]]:
        """Return a record for each worker on a running machine, oldest first."""
        records = []
        for node in self.snapshot.nodes:
            # The thread does not see a release before its next tick; show the release immediately.
            is_leaving = node.is_leaving or node.id in self._releasing
            for worker in node.workers:
                state = "running" if self._facts.is_connected(worker) else "starting"
                records.append(
                    {
                        "worker": worker,
                        "pid": 0,
                        "state": "draining" if is_leaving else state,
                        "device": node.device,
                        "type": node.instance.type,
                        "zone": node.instance.zone,
                        "lifecycle": node.instance.lifecycle,
                        # The price of the machine is divided among its workers, because callers sum
                        # over workers.
                        "price_usd_per_h": node.usd_per_h / len(node.workers),
                    }
                )
        return records

    def costs(self) -> list[NodeCost]:
        """Return the cost of each node since the cluster's start, including terminated ones."""
        return list(self.snapshot.costs)

    @property
    def snapshot(self) -> FleetSnapshot:
        """The thread's last snapshot; empty before ``start``."""
        return self._reconciler.snapshot if self._reconciler else FleetSnapshot()

    async def close(self, *, grace_s: float) -> None:
        """Terminate all machines and remove the cluster's resources, except the ledger.

        A security group can only be removed after its machines have terminated, which may take
        minutes. Any leftover resources carry the cluster's tag, so ``etrain reap`` finds them.
        """
        if self._reconciler is not None:
            # First stop the thread, which would replace the machines that are terminated below.
            await asyncio.to_thread(self._reconciler.stop)
        try:
            left = await asyncio.to_thread(
                remove,
                self._clients,
                self._spec.region,
                self._dir.cluster_id,
                timeout_s=max(grace_s, CLOSE_S),
                home=self._spec.home(self._dir.cluster_id),
                # An on-demand head cannot terminate the machine that it is still running on. Its
                # agent turns that machine off, and the notebook's `down` or `etrain reap` removes
                # the rest.
                spares_head=os.environ.get("ETRAIN_ROLE") == "head",
            )
            if left:
                logger.warning("not removed of cluster %s: %s", self._dir.cluster_id, left)
        except PoolError as exc:
            logger.warning("cluster %s was not removed: %s", self._dir.cluster_id, exc)
        if self._reconciler is not None:
            # The end times of all machines are known only now.
            await asyncio.to_thread(self._reconciler.settle)

    # --- between loop and thread ---

    def _update_desired(self, *, wake: bool = False) -> None:
        thread = self._reconciler
        if thread is None:
            return
        living = {node.id for node in thread.snapshot.nodes}
        self._noticed = {
            id: one
            for id, one in self._noticed.items()
            # Machines that are not listed may be new; drop notices only after their deadline.
            if id in living or time.time() < one.deadline
        }
        thread.desired = DesiredFleet(
            wanted=max(self._wanted, self._min_workers),
            connected=self._nodes_with(self._facts.is_connected),
            busy=self._nodes_with(self._facts.is_busy),
            releasing=dict(self._releasing),
            killing=frozenset(self._killing),
            noticed=dict(self._noticed),
            jobs=tuple(self._facts.progress()),
        )
        if wake:
            thread.wake()

    def _nodes_with(self, has_state: Callable[[str], bool]) -> frozenset[str]:
        """Return the nodes with any worker in a state; all workers end with their machine."""
        return frozenset(
            node.id for node in self.snapshot.nodes if any(map(has_state, node.workers))
        )

    def _gone(self, worker: str, why: str) -> None:
        # Called once per worker on the machine; the first call cleans up.
        node = node_of(worker)
        self._releasing.pop(node, None)
        self._killing.discard(node)
        self._noticed.pop(node, None)
        self._facts.on_gone(worker, why)

    def _reports(self, loop: asyncio.AbstractEventLoop) -> Reports:
        def on_loop(callback: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                # The loop may be closed before the thread ends.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(callback, *args)

            return call

        return Reports(
            gone=on_loop(self._gone),
            warning=on_loop(self._facts.on_warning),
            note=on_loop(self._facts.on_note),
            halt=on_loop(self._facts.on_halt),
            leaving=on_loop(self._facts.on_notice),
        )
