"""Whatever EC2 lists, loses, delays and takes: never more machines than the spec allows."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.plugins.ec2.fleet_state import (
    Ack,
    FleetResult,
    FleetState,
    LaunchFailure,
    LaunchRequest,
)
from etrain_jupyter.plugins.ec2.head.fleet import decide
from etrain_jupyter.plugins.ec2.head.view import Machine, Rules, View
from etrain_jupyter.plugins.ec2.placement import Offer

ZONES = ("us-east-1a", "us-east-1b")
USD = {("g5.xlarge", 1): 0.40, ("g6.xlarge", 1): 0.38, ("g5.12xlarge", 4): 1.7}


@dataclass
class Cloud:
    """EC2's behaviour: late listings, lost answers, changing capacity."""

    random: random.Random
    capacity: dict[tuple[str, str], int]
    machines: dict[str, Machine] = field(default_factory=dict)
    listed_at: dict[str, float] = field(default_factory=dict)
    answers: dict[str, FleetResult] = field(default_factory=dict)

    def launch(self, request: LaunchRequest, now: float) -> FleetResult | None:
        if self.random.random() < 0.2:
            return None  # throttled: nothing was launched
        if request.token not in self.answers:
            self.answers[request.token] = self._fill(request, now)
        return None if self.random.random() < 0.2 else self.answers[request.token]

    def _fill(self, request: LaunchRequest, now: float) -> FleetResult:
        acks = []
        for type, zone in request.overrides:
            while len(acks) < request.num_nodes and self.capacity[type, zone] > 0:
                self.capacity[type, zone] -= 1
                id = f"i-{len(self.machines)}"
                self.machines[id] = Machine(
                    id=id,
                    type=type,
                    zone=zone,
                    lifecycle=request.lifecycle,
                    workers=request.workers_each,
                    launched_at=now,
                )
                self.listed_at[id] = now + self.random.choice([0, 3, 20, 110])
                acks.append(
                    Ack(
                        id=id,
                        type=type,
                        zone=zone,
                        lifecycle=request.lifecycle,
                        workers=request.workers_each,
                        at=now,
                    )
                )
        if len(acks) == request.num_nodes:
            return FleetResult(acks=tuple(acks))
        refusals = tuple(
            LaunchFailure(type=type, zone=zone, code="ICE", message="", kind="capacity")
            for type, zone in request.overrides
        )
        return FleetResult(acks=tuple(acks), refusals=refusals)

    def end(self, id: str) -> None:
        machine = self.machines.pop(id, None)
        if machine is not None:
            self.machines[f"gone-{len(self.machines)}-{id}"] = dataclasses.replace(
                machine, is_leaving=True
            )
            self.capacity[machine.type, machine.zone] += self.random.choice([0, 1])

    def alive(self) -> list[Machine]:
        return [m for id, m in self.machines.items() if not id.startswith("gone-")]

    def list(self, now: float) -> tuple[Machine, ...]:
        return tuple(
            dataclasses.replace(m, is_ready=now - m.launched_at > 60)
            for m in self.alive()
            if self.listed_at[m.id] <= now
        )


def live_through(seed: int, rules: Rules, num_ticks: int, *, counts_unlisted: bool = True) -> Cloud:
    """Run the rules against a cloud; check after each step."""
    chance = random.Random(seed)
    capacity = {(type, zone): chance.randint(0, 3) for type, _ in USD for zone in ZONES}
    cloud = Cloud(chance, capacity)
    state, now, wanted = FleetState(), 1_000_000.0, 0
    spent, spares, rates = 0.0, chance.choice([0, 0, 1, 3]), dict[str, float]()
    for _ in range(num_ticks):
        if chance.random() < 0.2:
            wanted = chance.randint(0, 12)
        if chance.random() < 0.05:
            rates = {type: chance.uniform(1.0, 20.0) for type, _ in USD if chance.random() < 0.6}
        if chance.random() < 0.1 and (alive := cloud.alive()):
            cloud.end(chance.choice(alive).id)
        if chance.random() < 0.1:
            state = FleetState.from_dict(state.to_dict())
        price = {key: usd * chance.choice([1.0, 1.0, 1.3]) for key, usd in USD.items()}
        offers = tuple(
            Offer(type=type, zone=zone, workers=workers, spot_usd=usd, on_demand_usd=3 * usd)
            for (type, workers), usd in price.items()
            for zone in ZONES
        )
        listed = cloud.list(now)
        state = state.listed(m.id for m in listed)
        rate = sum(price[m.type, m.workers] for m in listed)
        spent += rate * 5 / 3600
        view = View(
            now=now,
            wanted=wanted,
            machines=listed,
            offers=offers,
            rate_usd=rate,
            spent_usd=spent,
            spares=spares,
            type_rates=rates,
            gradient_bytes=1e6,
            steps_per_s=1.0,
        )
        decision = decide(state if counts_unlisted else state.with_(acks=()), rules, view)
        state = decision.state
        for request in decision.launches:
            state = state.sent(request, now)
            if (answer := cloud.launch(request, now)) is not None:
                state = state.answered(request, answer, now)
            assert sum(m.workers for m in cloud.alive()) <= rules.max_workers
            on_demand = [m for m in cloud.alive() if m.lifecycle == "on-demand"]
            assert sum(m.workers for m in on_demand) <= max(rules.most_on_demand, 3)
        for id, _ in (*decision.releases, *decision.terminations):
            cloud.end(id)
        known = {id for id in decision.lookups if id in cloud.machines}
        state = state.looked_up(known, set(decision.lookups) - known, now)
        now += chance.choice([1, 5, 5, 30])
    return cloud


rules = st.builds(
    Rules,
    cluster_id=st.just("c"),
    max_workers=st.integers(1, 8),
    is_single_zone=st.booleans(),
    on_shortage=st.sampled_from(["shrink", "migrate", "spread", "auto"]),
    on_demand_base=st.integers(0, 1),
    most_on_demand=st.integers(1, 3),
    on_demand_after_s=st.sampled_from([30.0, 120.0]),
    linger_s=st.sampled_from([0.0, 120.0]),
    max_hourly=st.none() | st.floats(0.3, 5.0),
)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), rules=rules)
def test_there_are_never_more_workers_than_max(seed: int, rules: Rules) -> None:
    live_through(seed, rules, num_ticks=120)


def test_control_that_ignores_unlisted_machines_launches_too_many() -> None:
    own = Rules(cluster_id="c", max_workers=4)

    def live_fifty_times() -> None:
        for seed in range(50):
            live_through(seed, own, 120, counts_unlisted=False)

    with pytest.raises(AssertionError):
        live_fifty_times()


def test_simulated_cloud_launches_machines_and_answers_requests() -> None:
    cloud = live_through(7, Rules(cluster_id="c", max_workers=6), num_ticks=300)

    assert len(cloud.machines) > 10
    assert len(cloud.answers) > 10


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), max_workers=st.integers(1, 6))
def test_with_capacity_all_wanted_workers_are_launched(seed: int, max_workers: int) -> None:
    chance = random.Random(seed)
    cloud = Cloud(chance, {(type, zone): 9 for type, _ in USD for zone in ZONES})
    own = Rules(cluster_id="c", max_workers=max_workers, linger_s=30.0)
    state, now = FleetState(), 1_000_000.0
    offers = tuple(
        Offer(type=type, zone=ZONES[0], workers=n, spot_usd=usd) for (type, n), usd in USD.items()
    )
    for _ in range(200):
        listed = cloud.list(now)
        state = state.listed(m.id for m in listed)
        decision = decide(
            state, own, View(now=now, wanted=max_workers, machines=listed, offers=offers)
        )
        state = decision.state
        for request in decision.launches:
            state = state.sent(request, now)
            if (answer := cloud.launch(request, now)) is not None:
                state = state.answered(request, answer, now)
        for id, _ in decision.releases:
            cloud.end(id)
        now += 5.0

    assert sum(m.workers for m in cloud.alive()) == max_workers
