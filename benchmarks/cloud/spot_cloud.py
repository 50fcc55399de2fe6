"""Play one day of ``spot`` on the fake cloud while a real job trains."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import etrain_jupyter
from benchmarks.cloud.spot_losses import (
    DayMachine,
    DayRecord,
    Interruption,
    full_rate,
    moments_of,
    quantized_rates,
    split_losses,
)
from benchmarks.cloud.spot_money import day_usd, money_of
from benchmarks.cloud.spot_trace import Change
from benchmarks.common import ours
from etrain_jupyter import TrainingJob
from etrain_jupyter.log.events import WorkerWarmed
from etrain_jupyter.plugins.ec2.fleet_state import STATE_FILE, FleetState
from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.pools import clusters
from etrain_jupyter.process.cluster_dir import cluster_dirs

TYPE = "g6.xlarge"
ON_DEMAND_USD = 0.8048
SPOT_USD = 0.2817
ZONES = ("us-east-1a", "us-east-1b")
NOTICE_S, REBALANCE_S = 8.0, 4.0
"""Real seconds from notice to termination (EC2: two minutes), and from the rebalance recommendation
to the notice. They are not divided by the scale.
"""
BATCH_EACH = 8
"""Samples per worker and step."""
PATIENCE_S = 240.0
LOOK_S = 0.1

POOLS = """
spot:
  kind: aws-spot
  region: {region}
  bucket: {bucket}
  head_host: {host}
  workers: {{max: {max_workers}}}
  tick: 1 s
  capacity: {{types: [{type}], zones: [{zones}], placement: spread}}
  image: {{ami: {image}, python: {python}}}
  environment: {{PYTHONPATH: "{path}", OMP_NUM_THREADS: "1"}}
  lifetime: {{lease_ttl: 30 s, boot: 120 min, idle: 10 min, linger: 5 s}}
  interruption: {{imds_poll: 1 s, drain: 5 s}}
"""


@dataclass
class Player:
    """Apply a day's changes to the cloud.

    Args:
        cloud: The fake cloud.
        zones: Its zones.
        num_nodes: Capacity of each zone at the beginning of the day.
        replaces: Whether the cloud can replace interrupted machines.
    """

    cloud: FakeAws
    zones: Sequence[str]
    num_nodes: int
    replaces: bool
    ending: set[str] = field(default_factory=set)
    capacities: list[tuple[float, str, int]] = field(default_factory=list)
    """Capacity for machines that are not interrupted, by time and zone."""
    interruptions: list[Interruption] = field(default_factory=list)
    num_preempted: dict[str, int] = field(default_factory=dict)

    def living(self, zone: str) -> list[str]:
        """Return the ids of the pending and running machines of a zone, oldest first."""
        records = self.cloud.instances("pending", "running")
        return [one.instance_id for one in records if one.zone == zone]

    def begin(self) -> None:
        """Remove all unused capacity, unless machines are replaced."""
        self.capacities += [(time.time(), zone, self.num_nodes) for zone in self.zones]
        if not self.replaces:
            for zone in self.zones:
                self.cloud.set_capacity(len(self.living(zone)), zone=zone)

    def apply(self, change: Change) -> None:
        """Apply one change of price or capacity."""
        if change.price_factor is not None:
            self.cloud.set_price(round(SPOT_USD * change.price_factor, 4), zone=change.zone)
        if change.capacity is None:
            return
        living = self.living(change.zone)
        leaving = self.ending & set(living)
        staying = [one for one in living if one not in leaving]
        victims = staying[change.capacity :]
        now = time.time()
        self.capacities.append((now, change.zone, change.capacity))
        if self.replaces:
            # A victim keeps its capacity until it terminates, and then takes it away.
            room = max(change.capacity, len(staying)) if victims else change.capacity
            self.cloud.set_capacity(room + len(leaving), zone=change.zone)
        for victim in victims:
            self.cloud.preempt(
                victim,
                notice_s=NOTICE_S,
                rebalance_s=REBALANCE_S if change.way == "rebalance" else None,
                silent=change.way == "silent",
            )
            self.ending.add(victim)
            notice_at = now + (REBALANCE_S if change.way == "rebalance" else 0.0)
            ends_at = notice_at + (0.0 if change.way == "silent" else NOTICE_S)
            self.interruptions.append(
                Interruption(id=victim, at=now, notice_at=notice_at, ends_at=ends_at)
            )
            self.num_preempted[change.way] = self.num_preempted.get(change.way, 0) + 1


def run_day(
    day: Sequence[Change],
    *,
    folder: Path,
    replaces: bool,
    num_nodes: int,
    day_s: float,
    calm_s: float,
    scale: float,
) -> dict[str, Any]:
    """Train through a day, after an undisturbed period, and return the figures.

    Args:
        day: Changes of the day, at seconds of the day.
        folder: Folder for ``pools.yaml``.
        replaces: False for the control policy, under which no machine is replaced.
        num_nodes: Maximum number of workers.
        day_s: Real seconds in which the day is played.
        calm_s: Real seconds of the undisturbed period.
        scale: Seconds of the day per real second.
    """
    with FakeAws(minute_s=1.0) as cloud, pointed_at(cloud, folder, num_nodes), ours.cluster():
        job = submit(num_nodes)
        ours.wait_for(lambda: ours.settled_steps(job, num_nodes, 40), PATIENCE_S, "all", job)
        begin, first = time.time(), job.step
        watch(job, begin + calm_s)
        calm_rate = (job.step - first) / (time.time() - begin)
        player = Player(cloud=cloud, zones=ZONES, num_nodes=num_nodes, replaces=replaces)
        player.begin()
        before = cloud.bill()
        began_at, first = time.time(), job.step
        sizes: list[tuple[float, int]] = []
        back_offs = BackOffs()
        for change in day:
            sizes += watch(job, began_at + change.at_s / scale, back_offs)
            player.apply(change)
        sizes += watch(job, began_at + day_s, back_offs)
        took_s, last = time.time() - began_at, job.step
        day_money = day_usd(before, cloud.bill(), scale)
        job.stop(now=True)
        job.wait(timeout=PATIENCE_S)
        audit, cost, boots_s = job.audit(), job.cost(), boots_of(job, cloud, since=began_at)
        record = record_of(job, cloud, player, back_offs, begin=began_at, end=began_at + took_s)
        if not audit.ok:
            raise RuntimeError(f"the audit failed: {audit}")
        clusters.down(all_clusters=True)
        bill, ledger = cloud.bill(), ledger_of(cloud)
        left = cloud.leftovers()
    if left:
        raise RuntimeError(f"resources left in the cloud: {left}")
    # The load of the machine varies. The higher rate does not flatter the goodput.
    rate = max(
        calm_rate,
        full_rate(record.events, world_size=num_nodes, begin=began_at, end=began_at + took_s),
    )
    undisturbed = rate * took_s
    losses = split_losses(
        moments_of(record),
        rates=quantized_rates(BATCH_EACH * num_nodes, num_nodes),
        goodput=(last - first) / undisturbed,
    )
    return {
        "goodput": (last - first) / undisturbed,
        "allowed_goodput": losses.allowed,
        "goodput_by_allowed": losses.by_allowed,
        "trained_by_allowed": losses.trained_by_allowed,
        "lost_by_cause": dict(losses.by_cause),
        "useful_steps": last - first,
        "undisturbed_steps": undisturbed,
        "undisturbed_steps_per_s": rate,
        "calm_steps_per_s": calm_rate,
        "committed_by_executed": audit.steps_committed / audit.steps_executed,
        "wasted_steps": audit.steps_undone + audit.steps_rolled_back,
        "num_preemptions": sum(player.num_preempted.values()),
        "num_preemptions_by_way": player.num_preempted,
        "num_launched": len(bill.rows),
        "mean_world_size": mean_size(sizes),
        "share_without_worker": sum(s for s, size in sizes if not size) / took_s,
        "samples_lost": sum(epoch.missing for epoch in audit.epochs),
        "samples_repeated": sum(epoch.repeated for epoch in audit.epochs),
        "day_s": took_s,
        "boots_s": boots_s,
        "mean_boot_s": sum(boots_s) / len(boots_s),
        "job_cost": vars(cost),
        **money_of(
            ledger,
            bill,
            day=day_money,
            full_price_usd=num_nodes * ON_DEMAND_USD * took_s * scale / 3600,
            share_done=(last - first) / undisturbed,
        ),
    }


def boots_of(job: TrainingJob, cloud: FakeAws, *, since: float) -> list[float]:
    """Return the time from the launch of each machine until its trainer was warm, in seconds.

    Without machines launched after ``since``, those before it count. They boot at the same time, so
    they take longer.
    """
    launched = {one.instance_id: one.launched_at for one in cloud.instances()}
    boots = [
        (launched[event.worker], event.time - launched[event.worker])
        for event in job.events()
        if isinstance(event, WorkerWarmed) and event.worker in launched
    ]
    return [s for at, s in boots if at >= since] or [s for _, s in boots]


def ledger_of(cloud: FakeAws) -> dict[str, Any]:
    """Read the pool's ledger of the only cluster."""
    bucket = cloud.make_account().bucket
    (key,) = cloud.s3.list_keys(bucket, "etrain/ledgers/")
    ledger: dict[str, Any] = json.loads(cloud.s3.read(bucket, key))
    return ledger


def submit(num_nodes: int) -> TrainingJob:
    """Submit the job to the spot pool."""
    return etrain_jupyter.distributed(
        {
            "name": "bench-spot",
            "model": "benchmarks.cloud.spot_work:build_model",
            "data": {"train": "benchmarks.cloud.spot_work:make_points"},
            "loss": "benchmarks.cloud.spot_work:slow_loss",
            "optimizer": {"name": "SGD", "lr": 0.01},
            "batch": {"global": BATCH_EACH * num_nodes},
            "steps": ours.NEVER,
            "workers": {"min": 1, "max": num_nodes},
            "pool": "spot",
        }
    )


@dataclass
class BackOffs:
    """Zones in which the pool backs off, as the head's state shows them."""

    changes: list[tuple[float, frozenset[str]]] = field(default_factory=list)

    def poll(self) -> None:
        """Read the state, and record a change."""
        now = time.time()
        zones: set[str] = set()
        for folder in cluster_dirs():
            # The head replaces the file, and removes it at the end.
            with contextlib.suppress(FileNotFoundError):
                state = FleetState.from_dict(json.loads((folder.path / STATE_FILE).read_text()))
                zones |= {key[1] for key, one in state.back_offs.items() if now < one.until}
        if not self.changes or self.changes[-1][1] != zones:
            self.changes.append((now, frozenset(zones)))


def record_of(
    job: TrainingJob,
    cloud: FakeAws,
    player: Player,
    back_offs: BackOffs,
    *,
    begin: float,
    end: float,
) -> DayRecord:
    """Return what the cloud and the job recorded between two times."""
    machines = [
        DayMachine(
            id=one.instance_id,
            zone=one.zone,
            launched_at=one.launched_at,
            ended_at=one.ended_at or float("inf"),
        )
        for one in cloud.instances()
    ]
    return DayRecord(
        begin=begin,
        end=end,
        max_workers=player.num_nodes,
        capacities=player.capacities,
        machines=machines,
        interruptions=player.interruptions,
        events=list(job.events()),
        back_offs=back_offs.changes,
    )


def watch(
    job: TrainingJob, until: float, back_offs: BackOffs | None = None
) -> list[tuple[float, int]]:
    """Wait until the given time; return (seconds, world size) for each poll."""
    found = []
    seen = time.time()
    while (now := time.time()) < until:
        time.sleep(min(LOOK_S, until - now))
        job.raise_for_status()
        if back_offs is not None:
            back_offs.poll()
        found.append((time.time() - seen, job.world_size))
        seen = time.time()
    return found


def mean_size(sizes: Sequence[tuple[float, int]]) -> float:
    """Return the time-weighted mean number of workers.

    >>> mean_size([(1.0, 4), (3.0, 0)])
    1.0
    """
    return sum(s * size for s, size in sizes) / max(1e-9, sum(s for s, _ in sizes))


@contextlib.contextmanager
def pointed_at(cloud: FakeAws, folder: Path, num_nodes: int) -> Iterator[None]:
    """Point boto3 and the pool ``spot`` to the fake cloud."""
    account = cloud.make_account()
    cloud.set_market(
        [
            {"instance_type": TYPE, "zone": zone, "capacity": num_nodes, "price_usd": SPOT_USD}
            for zone in ZONES
        ],
        [{"instance_type": TYPE, "price_usd": ON_DEMAND_USD}],
    )
    file = folder / "pools.yaml"
    file.write_text(
        POOLS.format(
            region=account.region,
            bucket=account.bucket,
            host=cloud.host_address,
            max_workers=num_nodes,
            type=TYPE,
            zones=", ".join(ZONES),
            image=account.image,
            python=sys.executable,
            path=os.environ["PYTHONPATH"],
        )
    )
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(cloud.environment, ETRAIN_POOLS=str(file))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
