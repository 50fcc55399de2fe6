"""The nodes of a cluster as the reconcile thread sees them: ready, leaving, or gone.

The thread and the event loop exchange the immutable values defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etrain_jupyter.errors import StoreError
from etrain_jupyter.head.coordinator.nodes import JobProgress, NodeCost
from etrain_jupyter.plugins.ec2.ec2_api import Clients, Instance, console_tail, list_instances
from etrain_jupyter.plugins.ec2.fleet_state import FleetState
from etrain_jupyter.plugins.ec2.head.cluster_files import ClusterFiles, NodeState
from etrain_jupyter.plugins.ec2.head.fleet_messages import boot_failure, why_gone
from etrain_jupyter.plugins.ec2.head.view import Machine
from etrain_jupyter.plugins.ec2.launch_context import LaunchContext, workers_of
from etrain_jupyter.plugins.ec2.ledger import (
    FIRST_HOUR_S,
    TAKEN_BY_EC2,
    Ledger,
    PriceBook,
)
from etrain_jupyter.plugins.ec2.node_config import worker_names
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

RECLAIM_LATE_S = 120.0
"""Seconds after the announced time at which we terminate a machine that EC2 has not reclaimed."""


@dataclass(frozen=True, kw_only=True)
class NodeNotice:
    """EC2's notice to a node."""

    kind: str
    """``rebalance`` or ``interruption``."""
    deadline: float
    """When EC2 reclaims the machine, in seconds since the epoch; 0.0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class DesiredFleet:
    """Sent by the event loop: number of workers wanted, and the scheduler's view of nodes."""

    wanted: int = 0
    """Number of workers wanted."""
    connected: frozenset[str] = frozenset()
    """Nodes with a worker that is connected to the scheduler."""
    busy: frozenset[str] = frozenset()
    """Nodes used by a job."""
    releasing: Mapping[str, float] = field(default_factory=dict)
    """Nodes to terminate, with their deadlines in seconds since the epoch."""
    killing: frozenset[str] = frozenset()
    """Nodes to terminate immediately."""
    noticed: Mapping[str, NodeNotice] = field(default_factory=dict)
    jobs: tuple[JobProgress, ...] = ()
    """Active jobs, in order of submission."""


@dataclass(frozen=True, kw_only=True)
class FleetNode:
    """A node that EC2 lists."""

    instance: Instance
    workers: tuple[str, ...]
    """Names of its workers."""
    device: str
    usd_per_h: float = 0.0
    is_leaving: bool = False

    @property
    def id(self) -> str:
        """Id of the machine."""
        return self.instance.id


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """Sent by the thread: the nodes and their costs."""

    nodes: tuple[FleetNode, ...] = ()
    costs: tuple[NodeCost, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reports:
    """Callbacks for the thread; each one forwards its arguments to the event loop."""

    gone: Callable[[str, str], None]
    """Called with a worker whose machine is gone, and the reason."""
    warning: Callable[[str], None]
    note: Callable[[str], None]
    """Called with progress, such as a phase of a node's boot."""
    halt: Callable[[str], None]
    leaving: Callable[[str, float], None]
    """Called with a worker, and when its machine will end, in seconds since the epoch."""


class FleetRoster:
    """The cluster's nodes. Used by the reconcile thread only."""

    def __init__(
        self,
        files: ClusterFiles,
        clients: Clients,
        reports: Reports,
        *,
        max_failures: int = 3,
        installs: bool = False,
    ) -> None:
        self._max_failures = max_failures
        """Number of consecutive boot failures after which launches stop."""
        self._installs = installs
        """True if nodes install an environment, and report the phases of their boot."""
        self._files = files
        self._clients = clients
        self._reports = reports
        self.members: dict[str, FleetNode] = {}
        """Running nodes, by id."""
        self._known: set[str] | None = None
        """Ids of all nodes listed so far; None before the first update."""
        self.ready: set[str] = set()
        """Nodes whose workers have connected at least once."""
        self.leaving: dict[str, float] = {}
        """Deadlines of the released nodes, in seconds since the epoch."""
        self.ending: dict[str, str] = {}
        """Why we requested a node's termination, by id."""
        self._gone: list[tuple[str, str]] = []
        self._num_noted: dict[str, int] = {}
        """Number of boot phases reported so far, by node."""
        self.last_failure = ""
        """Message about the last node whose workers never connected."""

    def update(
        self,
        members: Sequence[FleetNode],
        desired: DesiredFleet,
        state: FleetState,
        now: float,
    ) -> FleetState:
        """Process EC2's listing: find nodes that are ready or gone, or failed to boot."""
        listed = {member.instance.id: member for member in members}
        #   EC2 lists it        query by id      result
        #   as living           -                member
        #   as ended            -                gone, with EC2's reason
        #   not                 living           member: the listing lagged behind
        #   not                 ended            gone, with EC2's reason
        #   not                 unknown          gone: EC2 forgets machines an hour after their end
        new = {id: member for id, member in listed.items() if member.instance.is_living}
        gone = [id for id in self.members if id not in new]
        # A listing may lack a running machine, so query it by id before declaring it gone.
        unlisted = [id for id in gone if id not in listed]
        for one in list_instances(self._clients.ec2, ids=unlisted) if unlisted else ():
            member = replace(self.members[one.id], instance=one)
            listed[one.id] = member
            if one.is_living:
                new[one.id] = member
        # Some machines end before any listing shows them running. Machines that have ended before
        # the first update belong to a previous head.
        if self._known is not None:
            gone += [id for id in listed if id not in self._known and id not in new]
        self._known = {*(self._known or ()), *listed}
        for id in gone:
            if id not in new:
                member = listed.get(id) or self.members[id]
                reason = member.instance.reason if id in listed else ""
                state = self._drop(member, reason, state, now)
        self.members = new
        for id in new:
            state = self._check_ready(id, desired, state, now)
        return state

    def machines(self, desired: DesiredFleet) -> tuple[Machine, ...]:
        """Return the running nodes as the rules see them."""
        return tuple(
            Machine(
                id=id,
                type=member.instance.type,
                zone=member.instance.zone,
                lifecycle=member.instance.lifecycle,
                workers=len(member.workers),
                launched_at=member.instance.launched_at,
                is_ready=id in self.ready,
                is_leaving=id in desired.releasing or id in self.leaving,
                is_at_risk=id in desired.noticed,
                is_busy=id in desired.busy,
            )
            for id, member in self.members.items()
        )

    def report_gone(self) -> None:
        """Report workers that are gone; call it after the snapshot has been published."""
        for worker, why in self._gone:
            self._reports.gone(worker, why)
        self._gone.clear()

    def _check_ready(
        self, id: str, desired: DesiredFleet, state: FleetState, now: float
    ) -> FleetState:
        """Check whether a node's workers have connected, or whether it refuses to serve."""
        # A node that was ready once has booted. A worker that later loses its connection is not a
        # boot failure.
        if id in self.ready or id in self.ending:
            return state
        # Read the report in S3 only if the connection does not answer the question. A worker may
        # connect and leave between two ticks, which only the report shows.
        is_connected = id in desired.connected
        # The phases of a boot are in the report, too.
        report = None if is_connected and not self._installs else self._report_of(id)
        self._note_phases(id, report, is_last=is_connected, now=now)
        if id in desired.connected or (report and report.state == "ready"):
            self.ready.add(id)
            return state.boot_succeeded()
        if report and report.state == "refused":
            # The machine turns itself off. `_due` also terminates it, in case it does not.
            self.ending[id] = report.error or "it refused to serve"
            return self._count_failure(id, self.ending[id], report.error, state, now)
        return state

    def _note_phases(self, id: str, report: NodeState | None, *, is_last: bool, now: float) -> None:
        """Report the phases of a node's boot that have ended since the last tick."""
        phases = report.phases if report is not None else ()
        if not phases:
            return
        known = self._num_noted.get(id, 0)
        one = self.members[id].instance
        if not known:
            started_s = phases[0].at - phases[0].seconds - one.launched_at
            self._reports.note(f"node {id} ({one.type}): boot {max(0.0, started_s):.1f} s")
        for phase in phases[known:]:
            self._reports.note(f"node {id}: {phase}")
        self._num_noted[id] = len(phases)
        if is_last:
            self._num_noted.pop(id)
            self._reports.note(
                f"node {id}: hello {max(0.0, now - phases[-1].at):.1f} s; its workers are "
                f"connected {max(0.0, now - one.launched_at):.1f} s after its launch"
            )

    def _drop(self, member: FleetNode, reason: str, state: FleetState, now: float) -> FleetState:
        id = member.instance.id
        requested = self.ending.pop(id, "")
        self._num_noted.pop(id, None)
        self.leaving.pop(id, None)
        why = requested or why_gone(reason)
        self._gone += [(worker, why) for worker in member.workers]
        # Only a machine that ended for an unknown reason before it was ready indicates a problem
        # with the image or the configuration.
        if id in self.ready or requested or reason.startswith(TAKEN_BY_EC2):
            return state
        report = self._report_of(id)
        if report and report.state == "ready":
            return state.boot_succeeded()
        error = report.error if report else ""
        return self._count_failure(id, why, error, state, now)

    def _count_failure(
        self, id: str, why: str, error: str, state: FleetState, now: float
    ) -> FleetState:
        # A node that refused or is overdue is counted immediately, not again when it is gone.
        if id in state.blamed:
            return state
        self.report_failure(id, why, error)
        return state.failed_to_boot(id, self._max_failures, now)

    def report_failure(self, id: str, why: str, error: str = "") -> None:
        """Report a node whose workers never connected, with its console output."""
        console = console_tail(self._clients.ec2, id)
        self.last_failure = boot_failure(id, why, error, console)
        self._reports.warning(self.last_failure)

    def _report_of(self, id: str) -> NodeState | None:
        try:
            return self._files.node_state(id)
        except StoreError:
            return None  # the lease renewal reports this, because it uses the same bucket

    def release(
        self,
        releases: Iterable[tuple[str, str]],
        desired: DesiredFleet,
        now: float,
        *,
        drain_s: float,
    ) -> None:
        """Schedule nodes for termination after the drain time, and notify the jobs on them."""
        for id, _ in releases:
            # The first release sets the deadline; the rules may repeat the release in every tick.
            if id not in self.leaving and id in self.members:
                self.leaving[id] = now + drain_s
                if id in desired.busy:
                    for worker in self.members[id].workers:
                        self._reports.leaving(worker, now + drain_s)


def nodes_of(
    instances: Iterable[Instance], spec: AwsSpotSpec, context: LaunchContext
) -> list[FleetNode]:
    """Return the nodes among the machines that EC2 lists, without the head's machine."""
    found = []
    for one in instances:
        if one.tags.get("etrain:role", "node") == "node":
            facts = context.types.get(one.type)
            names = worker_names(one.id, workers_of(spec, facts))
            device = "cuda:0" if facts and facts.gpus else "cpu"
            found.append(FleetNode(instance=one, workers=names, device=device))
    return found


def snapshot_of(
    roster: FleetRoster,
    ledger: Ledger,
    book: PriceBook,
    now: float,
    *,
    num_workers_of: Callable[[str], int],
) -> FleetSnapshot:
    """Return what the event loop shows: running nodes, and the costs of all nodes so far."""
    charges = ledger.charges(book, now)
    nodes = []
    for id, member in roster.members.items():
        one = member.instance
        usd = book.rate(one.type, one.zone, one.lifecycle, now) or 0.0
        is_leaving = id in roster.leaving or id in roster.ending
        nodes.append(replace(member, usd_per_h=usd, is_leaving=is_leaving))
    costs = tuple(
        NodeCost(
            node_id=row.id,
            workers=worker_names(row.id, num_workers_of(row.type)) if row.role == "node" else (),
            lifecycle=row.lifecycle,
            machine=row.type,
            spent_usd=charges[row.id].spent,
            on_demand_usd=charges[row.id].on_demand,
            is_alive=row.ended_at is None,
            hours=charges[row.id].hours,
        )
        for row in ledger.rows.values()
    )
    return FleetSnapshot(nodes=tuple(nodes), costs=costs)


def is_left_to_ec2(one: Instance, notice: NodeNotice | None, now: float) -> bool:
    """Return True if EC2 is about to reclaim a machine in its first hour, which is then free."""
    if notice is None or notice.kind != "interruption" or one.lifecycle != "spot":
        return False
    # Without a deadline, EC2 may reclaim the machine at any time from now on.
    ends_at = notice.deadline or now
    return ends_at - one.launched_at < FIRST_HOUR_S and now < ends_at + RECLAIM_LATE_S
