"""The workers of an ``aws-spot`` cluster, as the head's event loop asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.pools.ec2.bootstrap import config_of
from etrain_jupyter.pools.ec2.ec2_api import Clients
from etrain_jupyter.pools.ec2.head.desired_fleet import (
    DesiredFleet,
    NodeNotice,
    Reports,
    Snapshot,
    node_of,
)
from etrain_jupyter.pools.ec2.head.reconciler import Reconciler
from etrain_jupyter.pools.ec2.launch_context import set_up
from etrain_jupyter.pools.ec2.reaping import remove
from etrain_jupyter.pools.ec2.spec import AwsSpotSpec
from etrain_jupyter.process.cluster_dir import ClusterDir

logger = logging.getLogger(__name__)

CLOSE_S = 180.0
"""How long to try until nothing of the cluster is left: a security group goes last."""


class AwsNodes:
    """Asks for machines of EC2 and lets them go; no method blocks but ``start`` and ``close``.

    All callbacks are called on the event loop that ``start`` ran on.

    Args:
        cluster_dir: The cluster's folder on this machine.
        spec: What is allowed.
        is_connected: Tells whether the scheduler knows a worker.
        on_gone: Called with a worker whose machine is gone, and why.
        on_warning: Called with what the logs of jobs should say.
        on_halt: Called once, when nothing is launched any more, with why.
        clients: Of AWS; by default those of the spec.
        fingerprint: What is installed here, which nodes must have too.
    """

    replaces_early = True

    def __init__(
        self,
        cluster_dir: ClusterDir,
        spec: AwsSpotSpec,
        *,
        is_connected: Callable[[str], bool],
        on_gone: Callable[[str, str], None],
        on_warning: Callable[[str], None],
        on_halt: Callable[[str], None],
        clients: Clients | None = None,
        fingerprint: Mapping[str, str] | None = None,
    ) -> None:
        self.is_busy: Callable[[str], bool] | None = None
        """Tells whether a job uses a worker; None if nobody knows."""
        self.on_notice: Callable[[str, float], None] | None = None
        """Called with a worker that we shall end though a job uses it, and when (epoch seconds)."""
        self._dir = cluster_dir
        self._spec = spec
        self._is_connected = is_connected
        self._callbacks = (on_gone, on_warning, on_halt)
        self._clients = clients or Clients(spec)
        self._fingerprint = fingerprint
        self._wanted = 0
        self._held = spec.workers.want if spec.workers.want is not None else spec.workers.min
        self._releasing: dict[str, float] = {}
        self._killing: set[str] = set()
        self._noticed: dict[str, NodeNotice] = {}
        self._reconciler: Reconciler | None = None
        self._has_adopted = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, scheduler_address: str) -> None:
        """Set up what nodes need, adopt those that there are, take the lease, and begin.

        Args:
            scheduler_address: As nodes reach it, for example ``tls://10.0.3.7:8786``.

        Raises:
            PoolError: If AWS does not let us.
        """
        self._loop = asyncio.get_running_loop()
        config = config_of(
            self._spec,
            self._dir.cluster_id,
            fingerprint=self._fingerprint,
            supervisor=self._dir.settings().supervisor,
        )
        around = await asyncio.to_thread(
            set_up, self._clients, self._spec, self._dir.cluster_id, self._dir.tls, config
        )
        self._reconciler = Reconciler(
            self._spec, self._dir.cluster_id, self._clients, self._dir.path, around, self._reports()
        )
        try:
            await asyncio.to_thread(self._reconciler.adopt, scheduler_address)
        except StoreError as exc:
            raise PoolError(f"the lease of the cluster cannot be taken: {exc}") from exc
        self._has_adopted = True
        self._give_orders()
        self._reconciler.start()

    # --- what is wanted ---

    def want(self, count: int, *, reason: str) -> None:
        """Have ``count`` workers for the jobs, as far as the spec, EC2 and the budget go."""
        if count != self._wanted:
            logger.info("%d workers wanted instead of %d: %s", count, self._wanted, reason)
            self._wanted = count
            self._give_orders(wake=True)

    def hold(self, count: int, *, reason: str) -> None:
        """Keep at least ``count`` workers whatever the jobs want."""
        logger.info("at least %d workers held: %s", count, reason)
        self._held = count
        self._give_orders(wake=True)

    def capacity(self) -> int | None:
        """Return how many workers there can ever be; None until it is known who is there."""
        return self._spec.workers.max if self._has_adopted else None

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Note what EC2 has told a worker's machine: another one may come besides, beyond ``max``.

        Args:
            worker: Its name.
            kind: ``rebalance`` or ``interruption``.
            deadline: When EC2 takes it, in seconds since the epoch; 0.0 if unknown.
        """
        known = self._noticed.get(node_of(worker))
        if kind == "rebalance" and (known or self._spec.interruption.on_rebalance == "ignore"):
            return
        self._noticed[node_of(worker)] = NodeNotice(kind=kind, deadline=deadline)
        self._give_orders(wake=True)

    def release(self, worker: str, *, drain_s: float) -> None:
        """End a worker's machine once no job uses it, and after ``drain_s`` in any case.

        One that EC2 takes within its first hour is left to EC2, which then charges nothing.
        """
        self._releasing.setdefault(node_of(worker), time.time() + drain_s)
        self._give_orders(wake=True)

    def kill(self, worker: str) -> None:
        """End a worker's machine at once."""
        self._killing.add(node_of(worker))
        self._give_orders(wake=True)

    def reap(self) -> None:
        """Let the thread know what the scheduler knows; call it every second or so."""
        self._give_orders()

    # --- what there is ---

    def nodes(self) -> list[dict[str, Any]]:
        """Return a record a worker of a machine that lives, the oldest first."""
        records = []
        for node in self.snapshot.nodes:
            is_leaving = node.is_leaving or node.id in self._releasing
            for worker in node.workers:
                state = "running" if self._is_connected(worker) else "starting"
                records.append(
                    {
                        "worker": worker,
                        "pid": 0,
                        "state": "draining" if is_leaving else state,
                        "device": node.device,
                        "type": node.type,
                        "zone": node.zone,
                        "lifecycle": node.lifecycle,
                        "price_usd_per_h": node.usd_per_h / len(node.workers),
                    }
                )
        return records

    def costs(self) -> list[NodeCost]:
        """Return what each node has cost since the cluster began, ended ones too."""
        return list(self.snapshot.costs)

    @property
    def snapshot(self) -> Snapshot:
        """What the thread saw last: nodes, money, where prices come from, why it has halted."""
        return self._reconciler.snapshot if self._reconciler else Snapshot()

    async def close(self, *, grace_s: float) -> None:
        """End all machines and remove what belongs to them, but for the ledger.

        Machines are told to end at once; what they have made a security group wait for may take
        minutes. What is left then carries the cluster's tag, for whoever reaps it.
        """
        if self._reconciler is not None:
            await asyncio.to_thread(self._reconciler.stop)
        try:
            left = await asyncio.to_thread(
                remove,
                self._clients,
                self._spec.region,
                self._dir.cluster_id,
                timeout_s=max(grace_s, CLOSE_S),
                home=self._spec.home(self._dir.cluster_id),
                spares_head=os.environ.get("ETRAIN_ROLE") == "head",
            )
            if left:
                logger.warning("left of cluster %s: %s", self._dir.cluster_id, left)
        except PoolError as exc:
            logger.warning("cluster %s was not removed: %s", self._dir.cluster_id, exc)
        if self._reconciler is not None:
            await asyncio.to_thread(self._reconciler.settle)

    # --- between loop and thread ---

    def _give_orders(self, *, wake: bool = False) -> None:
        thread = self._reconciler
        if thread is None:
            return
        nodes = thread.snapshot.nodes
        living = {node.id for node in nodes}
        self._noticed = {
            id: one
            for id, one in self._noticed.items()
            # One that is not listed any more is gone; one that is not listed yet was just noticed.
            if id in living or time.time() < one.deadline
        }
        thread.orders = DesiredFleet(
            wanted=max(self._wanted, self._held),
            connected=frozenset(
                node.id for node in nodes if any(map(self._is_connected, node.workers))
            ),
            busy=frozenset(node.id for node in nodes if any(map(self._may_be_busy, node.workers))),
            releasing=dict(self._releasing),
            killing=frozenset(self._killing),
            noticed=dict(self._noticed),
        )
        if wake:
            thread.wake()

    def _may_be_busy(self, worker: str) -> bool:
        if self.is_busy is not None:
            return self.is_busy(worker)
        return self._wanted > 0 and self._is_connected(worker)

    def _gone(self, worker: str, why: str) -> None:
        node = node_of(worker)
        self._releasing.pop(node, None)
        self._killing.discard(node)
        self._noticed.pop(node, None)
        self._callbacks[0](worker, why)

    def _leaving(self, worker: str, deadline: float) -> None:
        if self.on_notice is not None:
            self.on_notice(worker, deadline)

    def _reports(self) -> Reports:
        """Return callbacks for the thread, which bring their words to the loop."""

        def on_loop(callback: Callable[..., None]) -> Callable[..., None]:
            def call(*words: Any) -> None:
                # The loop may have ended before the thread.
                with contextlib.suppress(RuntimeError):
                    if self._loop is not None:
                        self._loop.call_soon_threadsafe(callback, *words)

            return call

        _, on_warning, on_halt = self._callbacks
        return Reports(
            gone=on_loop(self._gone),
            warning=on_loop(on_warning),
            halt=on_loop(on_halt),
            leaving=on_loop(self._leaving),
        )
