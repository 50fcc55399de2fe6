"""The nodes of a cluster as the reconcile thread knows them: who serves, leaves, or is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from etrain_jupyter.errors import StoreError
from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.pools.ec2.ec2_api import Clients, Instance, console_tail, list_instances
from etrain_jupyter.pools.ec2.fleet_state import FleetState
from etrain_jupyter.pools.ec2.head.cluster_files import ClusterFiles, NodeState
from etrain_jupyter.pools.ec2.head.desired_fleet import (
    DesiredFleet,
    NodeFacts,
    NodeNotice,
    Reports,
    Snapshot,
    worker_names,
)
from etrain_jupyter.pools.ec2.head.fleet_messages import boot_failure, why_gone
from etrain_jupyter.pools.ec2.ledger import (
    FIRST_HOUR_S,
    TAKEN_BY_EC2,
    Ledger,
    PriceBook,
    Row,
)

TAKEN_LATE_S = 120.0
"""A machine that EC2 announced to take, and did not so long after, is ended by us."""


@dataclass(frozen=True, kw_only=True)
class FleetNode:
    """A node that EC2 lists."""

    instance: Instance
    workers: tuple[str, ...]
    """Names."""
    device: str


class FleetRoster:
    """Who is there. Used by the reconcile thread only.

    Args:
        files: Where nodes say how they are.
        clients: Of EC2, for consoles.
        reports: Who is told of those that are gone.
    """

    def __init__(self, files: ClusterFiles, clients: Clients, reports: Reports) -> None:
        self._files = files
        self._clients = clients
        self._reports = reports
        self.members: dict[str, FleetNode] = {}
        """Those that live."""
        self._known: set[str] | None = None
        """Those that were ever listed; None before the first look."""
        self.hello: set[str] = set()
        """Nodes whose workers work, or did."""
        self.leaving: dict[str, float] = {}
        """Nodes that we let go, and when at the latest."""
        self.ending: dict[str, str] = {}
        """Nodes that we have told EC2 to end, and why."""
        self._gone: list[tuple[str, str]] = []
        self.last_failure = ""
        """What is known of the last node that never said hello."""

    def look(
        self,
        members: Sequence[FleetNode],
        orders: DesiredFleet,
        memory: FleetState,
        max_failures: int,
        now: float,
    ) -> FleetState:
        """Take in what EC2 lists; tell of those that are gone, and count those that never worked.

        Args:
            members: Nodes that EC2 lists, ended ones too.
            orders: What the scheduler knows.
            memory: What the rules know.
            max_failures: After so many nodes in a row that never said hello, launches stop.
            now: The instant.
        """
        listed = {member.instance.id: member for member in members}
        new = {id: member for id, member in listed.items() if member.instance.is_living}
        gone = [id for id in self.members if id not in new]
        # A list may lack one that is there: ask for it by its name before it is given up.
        unlisted = [id for id in gone if id not in listed]
        for one in list_instances(self._clients.ec2, ids=unlisted) if unlisted else ():
            member = replace(self.members[one.id], instance=one)
            listed[one.id] = member
            if one.is_living:
                new[one.id] = member
        # Some end before they are seen alive. What had ended before the first look is history.
        if self._known is not None:
            gone += [id for id in listed if id not in self._known and id not in new]
        self._known = {*(self._known or ()), *listed}
        for id in gone:
            if id not in new:
                member = listed.get(id) or self.members[id]
                reason = member.instance.reason if id in listed else ""
                memory = self._drop(member, reason, memory, max_failures, now)
        self.members = new
        for id in new:
            memory = self._hear(id, orders, memory, max_failures, now)
        return memory

    def tell_gone(self) -> None:
        """Tell of the workers that are gone; call it when the loop can see that they are."""
        for worker, why in self._gone:
            self._reports.gone(worker, why)
        self._gone.clear()

    def _hear(
        self, id: str, orders: DesiredFleet, memory: FleetState, max_failures: int, now: float
    ) -> FleetState:
        """Look whether a node has said hello, or that it cannot."""
        if id in self.hello or id in self.ending:
            return memory
        told = None if id in orders.connected else self._state_of(id)
        if id in orders.connected or (told and told.state == "ready"):
            self.hello.add(id)
            return memory.said_hello()
        if told and told.state == "refused":
            self.ending[id] = told.error or "it refused to serve"
            return self._blame(id, self.ending[id], told.error, memory, max_failures, now)
        return memory

    def _drop(
        self, member: FleetNode, reason: str, memory: FleetState, max_failures: int, now: float
    ) -> FleetState:
        id = member.instance.id
        asked = self.ending.pop(id, "")
        self.leaving.pop(id, None)
        why = asked or why_gone(reason)
        self._gone += [(worker, why) for worker in member.workers]
        if id in self.hello or asked or reason.startswith(TAKEN_BY_EC2):
            return memory
        told = self._state_of(id)
        if told and told.state == "ready":
            return memory.said_hello()
        return self._blame(id, why, told.error if told else "", memory, max_failures, now)

    def _blame(
        self, id: str, why: str, error: str, memory: FleetState, max_failures: int, now: float
    ) -> FleetState:
        """Count a node that never worked, once, and say what is known of it."""
        if id in memory.blamed:
            return memory
        self.explain(id, why, error)
        return memory.failed_to_boot(id, max_failures, now)

    def explain(self, id: str, why: str, error: str = "") -> None:
        """Say what is known of a node that never worked, its console included."""
        console = console_tail(self._clients.ec2, id)
        self.last_failure = boot_failure(id, why, error, console)
        self._reports.warning(self.last_failure)

    def _state_of(self, id: str) -> NodeState | None:
        try:
            return self._files.node_state(id)
        except StoreError:
            return None  # the lease, which lies in the same bucket, tells of that

    def let_go(
        self,
        releases: Iterable[tuple[str, str]],
        orders: DesiredFleet,
        now: float,
        *,
        drain_s: float,
    ) -> None:
        """Note nodes that shall end, and tell the jobs that use them."""
        for id, _ in releases:
            if id not in self.leaving and id in self.members:
                self.leaving[id] = now + drain_s
                if id in orders.busy:
                    for worker in self.members[id].workers:
                        self._reports.leaving(worker, now + drain_s)


def snapshot_of(
    roster: FleetRoster,
    ledger: Ledger,
    book: PriceBook,
    now: float,
    *,
    workers_of: Callable[[str], int],
    prices: str,
    halted: str,
) -> Snapshot:
    """Return what the loop shows: the nodes that live, and what all of them have cost.

    Args:
        roster: Who lives.
        ledger: Who ever did.
        book: Prices.
        now: The instant.
        workers_of: Tells how many workers a type has.
        prices: Where prices come from.
        halted: Why nothing is launched any more.
    """
    charges = ledger.charges(book, now)
    nodes = tuple(
        NodeFacts(
            id=id,
            type=member.instance.type,
            zone=member.instance.zone,
            lifecycle=member.instance.lifecycle,
            workers=member.workers,
            device=member.device,
            usd_per_h=book.rate(
                member.instance.type, member.instance.zone, member.instance.lifecycle, now
            )
            or 0.0,
            is_leaving=id in roster.leaving or id in roster.ending,
            launched_at=member.instance.launched_at,
        )
        for id, member in roster.members.items()
    )
    costs = tuple(
        NodeCost(
            node_id=row.id,
            workers=worker_names(row.id, workers_of(row.type)) if row.role == "node" else (),
            lifecycle=row.lifecycle,
            spent_usd=charges[row.id].spent,
            on_demand_usd=charges[row.id].on_demand,
            is_alive=row.ended_at is None,
            hours=charges[row.id].hours,
        )
        for row in ledger.rows.values()
    )
    return Snapshot(
        nodes=nodes,
        costs=costs,
        charge=ledger.total(book, now),
        rate_usd=ledger.rate(book, now),
        prices=prices,
        halted=halted,
    )


def rows_of(
    instances: Sequence[Instance],
    ledger: Ledger,
    now: float,
    *,
    volume_gib: int,
    living: Iterable[str] = (),
) -> list[Row]:
    """Return what the ledger should know: what EC2 lists, and the end of what it lists no more.

    Args:
        instances: What EC2 lists.
        ledger: What is known.
        now: The instant.
        volume_gib: Of a node's disk.
        living: Machines that a list may lack, but that EC2 has when asked by name.
    """
    listed = {one.id for one in instances} | set(living)
    rows = [
        Row(
            id=one.id,
            type=one.type,
            zone=one.zone,
            lifecycle=one.lifecycle,
            launched_at=one.launched_at,
            ended_at=None if one.is_living else one.ended_at or now,
            reason="" if one.is_living else one.reason,
            volume_gib=float(volume_gib),
            role=one.tags.get("etrain:role", "node"),
        )
        for one in instances
    ]
    # EC2 forgets machines an hour after their end.
    gone = [row for row in ledger.rows.values() if row.ended_at is None and row.id not in listed]
    return [*rows, *(replace(row, ended_at=now) for row in gone)]


def is_left_to_ec2(one: Instance, notice: NodeNotice | None, now: float) -> bool:
    """Tell whether EC2 takes a machine in its first hour anyway, for which nothing is charged."""
    if notice is None or notice.kind != "interruption" or one.lifecycle != "spot":
        return False
    ends_at = notice.deadline or now
    return ends_at - one.launched_at < FIRST_HOUR_S and now < ends_at + TAKEN_LATE_S
