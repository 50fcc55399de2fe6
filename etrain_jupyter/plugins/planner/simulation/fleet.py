"""The pool's own fleet rules, ``fleet.decide``, in virtual time on a virtual market."""

from __future__ import annotations

from dataclasses import dataclass, field

from etrain_jupyter.plugins.ec2.fleet_state import (
    Ack,
    FleetResult,
    FleetState,
    LaunchFailure,
    LaunchRequest,
)
from etrain_jupyter.plugins.ec2.head.fleet import decide
from etrain_jupyter.plugins.ec2.head.view import Machine, Rules, View
from etrain_jupyter.plugins.ec2.ledger import FIRST_HOUR_S, PriceBook
from etrain_jupyter.plugins.ec2.placement import WAIT_S, Offer
from etrain_jupyter.plugins.planner.simulation.market import TYPE, VirtualMarket, VirtualNode
from etrain_jupyter.rules.membership.state_machine import last_step_lead_s

MAX_ROUNDS = 20
"""Maximum number of decisions in a row; each grants machines, or backs off from a pool."""


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """A market's machines, grouped by what they do."""

    version: int = -1
    """Version of the market."""
    until: float = 0.0
    """Time at which a machine changes its group."""
    training: tuple[VirtualNode, ...] = ()
    """Machines whose workers can train, in this order: spot, on demand, spot that EC2 recommends
    replacing (each group oldest first), and those that EC2 is about to reclaim."""
    num_spot: int = 0
    """Number of spot machines in ``training`` that are not at risk."""
    num_on_demand: int = 0
    """Number of on-demand machines, including those that boot."""
    noticed: tuple[VirtualNode, ...] = ()
    """Machines that EC2 is about to reclaim."""
    num_at_risk: int = 0
    """Number of machines in ``training`` that EC2 recommends replacing."""
    num_leaving: int = 0
    """Number of machines in ``training`` that EC2 is about to reclaim; they come last."""

    def used_at_risk(self, wanted: int) -> int:
        """Return how many of the first ``wanted`` training machines are at risk."""
        num_staying = len(self.training) - self.num_leaving
        return max(0, min(num_staying, wanted) - (num_staying - self.num_at_risk))


def _group(market: VirtualMarket, now: float) -> _Groups:
    until = float("inf")
    spot: list[VirtualNode] = []
    on_demand: list[VirtualNode] = []
    noticed: list[VirtualNode] = []
    leaving: list[tuple[float, VirtualNode]] = []
    num_on_demand = 0
    for node in market.nodes.values():
        num_on_demand += node.lifecycle == "on-demand"
        if node.notice_at <= now:
            noticed.append(node)
            # As in ``rules.membership``, it trains until it is replaced, or shortly before the end.
            leave_at = node.lost_at - last_step_lead_s(node.lost_at - node.notice_at)
            if node.ready_at <= now < leave_at:
                leaving.append((leave_at, node))
                until = min(until, leave_at)
            continue
        until = min(
            until, *(at for at in (node.ready_at, node.risk_at, node.notice_at) if at > now)
        )
        if node.ready_at <= now:
            (spot if node.lifecycle == "spot" else on_demand).append(node)
    at_risk = [node for node in spot if node.risk_at <= now]
    safe = [node for node in spot if node.risk_at > now]
    return _Groups(
        version=market.version,
        until=until,
        # As in ``Sharing``, workers at risk are assigned last.
        training=(
            *safe,
            *on_demand,
            *at_risk,
            *(node for _, node in sorted(leaving, key=lambda one: -one[0])),
        ),
        num_leaving=len(leaving),
        num_at_risk=len(at_risk),
        num_spot=len(safe),
        num_on_demand=num_on_demand,
        noticed=tuple(noticed),
    )


@dataclass(kw_only=True)
class VirtualFleet:
    """One cluster's machines, decided by the rules that also run in the head.

    A tick is skipped if no input has changed and no timer of the rules is due, because the rules
    would decide the same; ``skips=False`` decides in each tick.
    """

    rules: Rules
    market: VirtualMarket
    prices: PriceBook
    skips: bool = True
    spares: int = 0
    """Number of spare workers, as in ``capacity.spares``."""
    state: FleetState = field(default_factory=FleetState)

    def __post_init__(self) -> None:
        self._inputs: object = None
        self._due_at = 0.0
        self._groups = _Groups()

    def tick(self, now: float, *, wanted: int, on_demand: int | None) -> None:
        """Decide and act."""
        self._power_off(now, wanted)
        groups = self.groups(now)
        inputs = (wanted, on_demand, groups.version, groups.until)
        if self.skips and inputs == self._inputs and now < self._due_at:
            return
        for _ in range(MAX_ROUNDS):
            groups = self.groups(now)
            # Replacements of machines with a notice, and of machines in use for which EC2
            # recommends it, are requested immediately; see `Sharing`.
            leaving = len(groups.noticed) + groups.used_at_risk(wanted)
            view = self._view(now, wanted + leaving, on_demand)
            decision = decide(self.state.listed(self.market.nodes), self.rules, view)
            self.state = decision.state
            for id, _ in (*decision.releases, *decision.terminations):
                if id in self.market.nodes:
                    self.market.end(id, now)
            for request in decision.launches:
                self._launch(request, now)
            # The head starts its next tick immediately if machines were launched, and within 5 s if
            # a request was refused. The rules may then try another zone or lifecycle.
            if not decision.launches:
                break
        groups = self.groups(now)
        self._inputs = (wanted, on_demand, groups.version, groups.until)
        self._due_at = self._next_timer(now)

    def groups(self, now: float) -> _Groups:
        """Return the machines, grouped by what they do now."""
        known = self._groups
        # Nothing changes until a machine starts or ends, is ready, or has a notice.
        if known.version != self.market.version or now >= known.until:
            known = self._groups = _group(self.market, now)
        return known

    def _power_off(self, now: float, wanted: int) -> None:
        """End idle machines with a notice, except those in their first hour, which become free."""
        groups = self.groups(now)
        used = groups.training[:wanted]
        for node in groups.noticed:
            if node not in used and node.lost_at - node.launched_at >= FIRST_HOUR_S:
                self.market.end(node.id, now)

    def _view(self, now: float, wanted: int, on_demand: int | None) -> View:
        has_budget = self.rules.max_total is not None or self.rules.max_hourly is not None
        rows = [node.row for node in self.market.nodes.values()] if has_budget else []
        charges = self.market.charges(self.prices, now) if has_budget else {}
        return View(
            now=now,
            wanted=wanted,
            machines=tuple(
                Machine(
                    id=node.id,
                    type=TYPE,
                    zone=node.zone,
                    lifecycle=node.lifecycle,
                    workers=1,
                    launched_at=node.launched_at,
                    is_ready=node.ready_at <= now,
                    is_at_risk=node.risk_at <= now,
                    is_busy=node.ready_at <= now,
                )
                for node in self.market.nodes.values()
            ),
            offers=tuple(
                Offer(
                    type=TYPE,
                    zone=zone,
                    spot_usd=self.prices.spot_at(TYPE, zone, now),
                    on_demand_usd=self.prices.on_demand.get(TYPE),
                )
                for zone in self.market.trace.zones
            ),
            spent_usd=sum(one.spent for one in charges.values()),
            rate_usd=sum(self.prices.rate(TYPE, r.zone, r.lifecycle, now) or 0.0 for r in rows),
            on_demand=on_demand,
            spares=self.spares,
        )

    def _launch(self, request: LaunchRequest, now: float) -> None:
        self.state = self.state.sent(request, now)
        zones = [zone for _, zone in request.overrides]
        nodes = self.market.launch(request.lifecycle, zones, request.num_nodes, now)
        acks = tuple(
            Ack(
                id=node.id,
                type=TYPE,
                zone=node.zone,
                lifecycle=node.lifecycle,
                workers=1,
                at=now,
            )
            for node in nodes
        )
        refusals = tuple(
            LaunchFailure(type=TYPE, zone=zone, code="", message="", kind="capacity")
            for zone in zones
            if len(nodes) < request.num_nodes
        )
        answer = FleetResult(acks=acks, refusals=refusals)
        self.state = self.state.answered(request, answer, now)

    def _next_timer(self, now: float) -> float:
        """Return when the rules may decide differently although no input has changed."""
        rules, state = self.rules, self.state
        if rules.max_total is not None or rules.max_hourly is not None:
            return now
        times = [one.until for one in state.back_offs.values()]
        if state.short_since is not None:
            times += [state.short_since + WAIT_S, state.short_since + rules.on_demand_after_s]
        if state.surplus_since is not None:
            times.append(state.surplus_since + rules.linger_s)
        times += [
            n.launched_at + rules.boot_s for n in self.market.nodes.values() if n.ready_at > now
        ]
        return min((at for at in times if at > now), default=float("inf"))
