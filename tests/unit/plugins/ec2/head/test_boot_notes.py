"""Phases of a node's boot, from its report to the logs of jobs."""

from __future__ import annotations

import json

from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.ec2_api import Instance
from etrain_jupyter.plugins.ec2.fleet_state import FleetState
from etrain_jupyter.plugins.ec2.head.cluster_files import BootPhase, ClusterFiles
from etrain_jupyter.plugins.ec2.head.roster import DesiredFleet, FleetNode, FleetRoster, Reports

NODE = Instance(
    id="i-1",
    type="g5.xlarge",
    zone="us-east-1a",
    lifecycle="spot",
    state="running",
    launched_at=100.0,
)
MEMBER = FleetNode(instance=NODE, workers=("i-1",), device="cuda:0")


class Reporting:
    """The bucket, with one node's report."""

    def __init__(self) -> None:
        self.report: dict[str, object] = {}
        self.num_reads = 0

    def get(self, key: str, what: str) -> bytes:
        self.num_reads += 1
        if not self.report:
            raise StoreError(what)
        return json.dumps(self.report).encode()


def phase(name: str, seconds: float, at: float, detail: str = "") -> dict[str, object]:
    return {"name": name, "seconds": seconds, "at": at, "detail": detail}


def make(bucket: Reporting, notes: list[str], *, installs: bool = True) -> FleetRoster:
    def ignore(*_: object) -> None:
        return

    reports = Reports(gone=ignore, warning=ignore, note=notes.append, halt=ignore, leaving=ignore)
    files = ClusterFiles(bucket, "c1")  # type: ignore[arg-type]
    return FleetRoster(files, None, reports, installs=installs)  # type: ignore[arg-type]


def tick(roster: FleetRoster, now: float, *, is_connected: bool = False) -> None:
    connected = frozenset({"i-1"} if is_connected else ())
    roster.update([MEMBER], DesiredFleet(connected=connected), FleetState(), now)


def test_each_phase_is_reported_once_with_its_seconds() -> None:
    bucket, notes = Reporting(), list[str]()
    roster = make(bucket, notes)
    tick(roster, 110.0)
    assert notes == []
    bucket.report = {"state": "booting", "phases": [phase("download", 5.0, 125.0, "9 wheels")]}
    tick(roster, 126.0)
    tick(roster, 127.0)
    assert notes == ["node i-1 (g5.xlarge): boot 20.0 s", "node i-1: download 5.0 s (9 wheels)"]
    notes.clear()
    phases = [phase("download", 5.0, 125.0, "9 wheels"), phase("install", 10.0, 135.0)]
    bucket.report = {"state": "ready", "phases": phases}
    tick(roster, 140.0, is_connected=True)
    assert notes == [
        "node i-1: install 10.0 s",
        "node i-1: hello 5.0 s; its workers are connected 40.0 s after its launch",
    ]
    num_reads = bucket.num_reads
    tick(roster, 141.0, is_connected=True)
    assert (len(notes), bucket.num_reads) == (2, num_reads)


def test_report_of_a_connected_node_is_not_read_if_its_image_is_complete() -> None:
    bucket, notes = Reporting(), list[str]()
    tick(make(bucket, notes, installs=False), 110.0, is_connected=True)
    assert (bucket.num_reads, notes) == (0, [])


def test_phases_that_are_not_valid_are_left_out() -> None:
    report = {"phases": [phase("download", 1.0, 2.0), {"name": "x"}, 3, None, {"seconds": "a"}]}
    assert BootPhase.read_all(report) == (BootPhase(name="download", seconds=1.0, at=2.0),)
    assert BootPhase.read_all({"phases": None}) == ()
