"""Our part inside somebody else's scheduler and workers: it costs nothing and breaks nothing."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.protocol.pickle import dumps

from etrain_jupyter import __version__
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.log import events
from etrain_jupyter.pools.address import guest_worker
from etrain_jupyter.pools.address.coordinator import GuestCoordinator
from etrain_jupyter.pools.address.guest import UNFIT, GuestSupervisor, sent_as_code
from etrain_jupyter.pools.address.guest_worker import find_device, look_here, make_supervisor
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from tests.unit.head.coordinator.rig import HELLO, Rig


class Scheduler(SimpleNamespace):
    """What a guest touches of Dask's scheduler."""

    def __init__(self, **values: Any) -> None:
        names = ("workers", "stream_comms", "handlers", "stream_handlers", "plugins")
        super().__init__(**{name: {} for name in names}, **values)
        self.handlers["theirs"] = self.plugins["theirs"] = None
        self.blind: set[str] = set()
        self.retired: list[str] = []

    async def broadcast(self, *, msg: Any, workers: list[str], on_error: str) -> dict[str, Any]:
        return {at: {"status": "OK", "result": at not in self.blind} for at in workers}

    async def retire_workers(self, *, workers: list[str], close_workers: bool) -> None:
        assert close_workers
        self.retired += workers

    def remove_plugin(self, name: str) -> None:
        del self.plugins[name]


class GuestRig(Rig):
    coordinator: GuestCoordinator

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        super().__init__(folder, monkeypatch)
        self.coordinator = pickle.loads(pickle.dumps(GuestCoordinator(cluster_id="theirs")))
        self.scheduler = Scheduler()
        self.scheduler.stream_comms = self.streams
        self.scheduler.plugins[GuestCoordinator.name] = self.coordinator
        (folder / "j").mkdir()

    def hello(self, *names: str, incarnation: int = 0) -> None:
        for name in names:
            state = SimpleNamespace(name=name, address=f"tls://{name}:1")
            self.scheduler.workers[f"tls://{name}"] = state
        super().hello(*names, incarnation=incarnation)
        for name in names:
            self.scheduler.workers[f"tls://{name}"].address = f"tls://{name}:1"


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    rig = GuestRig(tmp_path, monkeypatch)
    await rig.coordinator.start(rig.scheduler)
    yield rig
    await rig.coordinator.close()


def told(rig: Rig, worker: str) -> list[str]:
    orders = rig.streams[f"tls://{worker}"].orders
    kinds = {m.WakeSupervisor: "wake", m.RestSupervisor: "rest", m.LaunchTrainer: "start"}
    return [kinds[type(order)] for order in orders if type(order) in kinds]


async def test_workers_are_woken_by_a_job_before_they_start_its_trainers_and_then_rest(rig):
    rig.hello("w1")
    assert told(rig, "w1") == []
    await rig.submit(max_workers=2)
    assert told(rig, "w1") == ["wake", "start"]
    rig.hello("w2")
    assert "wake" in told(rig, "w2")

    rig.job.handle(s.StopRequested(now=True))
    rig.tick()
    rig.coordinator._rest()
    assert told(rig, "w1") == ["wake", "start", "rest"]


async def test_silent_worker_is_not_evicted_while_no_job_runs(rig):
    rig.hello("w1")
    rig.now += 3600
    await rig.start("w1")
    rig.tick()
    rig.tick()
    assert [w.name for w in rig.coordinator._workers] == ["w1"]


async def test_scheduler_does_not_end_as_idle_nor_close_busy_workers_while_a_job_trains(rig):
    await rig.start("w1")
    rig.hello("unused")
    rig.scheduler.idle_since = 1.0
    rig.tick()
    assert rig.scheduler.idle_since is None
    workers = list(rig.scheduler.workers.values())
    may_close = rig.coordinator.valid_workers_downscaling(rig.scheduler, workers)
    assert [state.name for state in may_close] == ["unused"]

    rig.job.handle(s.StopRequested(now=True))
    rig.scheduler.idle_since = 1.0
    rig.tick()
    assert rig.scheduler.idle_since == 1.0
    assert rig.coordinator.valid_workers_downscaling(rig.scheduler, workers) == workers


async def test_exception_in_a_report_does_not_reach_dask(rig, caplog):
    rig.survive_defects()
    rig.say("stranger", m.SupervisorHello(**HELLO))
    assert "handling SupervisorHello of tls://stranger failed: KeyError" in caplog.text


async def test_job_whose_folder_is_missing_on_a_worker_is_refused(rig, monkeypatch):
    rig.hello("w1", "w2")
    rig.scheduler.blind.add("tls://w2")
    with pytest.raises(RequestError, match=r"does not exist on w2: .* ETRAIN_RUNS"):
        await rig.submit()
    shutil.rmtree(rig.folder / "j")
    elsewhere = {"bundle_digest": "0" * 64, "bundle_size": 1}
    monkeypatch.setattr("tests.unit.head.coordinator.rig.put_bundle", lambda order: elsewhere)
    with pytest.raises(RequestError, match="does not exist on the scheduler, w2"):
        await rig.submit()
    assert rig.coordinator._jobs == {}


async def test_unfit_worker_is_not_a_node_and_is_logged(rig):
    rig.hello("w1")
    rig.scheduler.workers["tls://w2"] = SimpleNamespace(name="w2", address="tls://w2:1")
    early = {"name": "w2", "why": "RuntimeError: no torch", "worker": "tls://w2"}
    rig.coordinator.log_event(UNFIT, early)
    rig.coordinator.log_event("somebody's topic", "of no interest")
    await rig.submit()
    rig.coordinator.log_event(UNFIT, {**early, "name": "w3"})

    lines = [event.text for event in rig.events(events.LogLine)]
    assert lines == [f"worker {w} cannot train: RuntimeError: no torch" for w in ("w2", "w3")]
    nodes = (await rig.coordinator._list_nodes(q.ListNodes())).nodes
    assert [(node["worker"], node["state"]) for node in nodes] == [("w1", "running")]


async def test_released_worker_retires_after_its_job_has_left_it(rig):
    await rig.start("w1", "w2")
    rig.hello("unused")
    for name in ("unused", "unused", "nobody", "w2"):
        await rig.coordinator._release(q.ReleaseWorker(worker=name, drain_s=60.0))
    await asyncio.sleep(0.01)
    assert rig.scheduler.retired == ["tls://unused"]
    del rig.scheduler.workers["tls://unused"]
    rig.coordinator.remove_worker(rig.scheduler, "tls://unused")
    assert rig.events(events.PreemptionNoticed)[0].worker == "w2"

    for worker in ("w1", "w2"):
        rig.report(worker, 5, "planned")
    rig.tell("w1", m.GenerationJoined, step=5)
    rig.tick()
    await asyncio.sleep(0.01)
    assert rig.scheduler.retired == ["tls://unused", "tls://w2"]


async def test_uninstalling_restores_the_scheduler_and_ignores_late_messages(rig):
    before = {"theirs"}
    assert rig.scheduler.handlers.keys() > before
    await rig.coordinator._down(q.ShutDownCluster(drain_s=0.0))
    await rig.coordinator._uninstall(q.RemoveCoordinator())

    assert rig.scheduler.handlers.keys() == rig.scheduler.plugins.keys() == before
    rig.scheduler.stream_handlers["etrain_report"](message={"op": "beat"}, worker="tls://w1")


# --- on a worker ---


def test_plugin_loads_without_this_package_and_reports_that_it_is_missing() -> None:
    with sent_as_code():
        data = dumps(GuestSupervisor(__version__))
    code = (
        "import sys, asyncio, types\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('etrain_jupyter'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from distributed.protocol.pickle import loads\n"
        "plugin = loads(sys.stdin.buffer.read())\n"
        "worker = types.SimpleNamespace(name='w', log_event=lambda *told: print(told))\n"
        "asyncio.run(plugin.setup(worker)); asyncio.run(plugin.teardown(worker))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout.decode().startswith(f"({UNFIT!r}, {{'name': 'w', 'why': 'ModuleNotFound")


def test_worker_with_another_version_is_refused() -> None:
    with pytest.raises(RuntimeError, match=rf"{__version__} is installed there, not 9\.9"):
        make_supervisor("9.9")
    assert make_supervisor(__version__).name == "etrain-supervisor"


def test_probe_reports_installed_versions_and_the_coordinator() -> None:
    assert look_here()["etrain-jupyter"] == __version__
    assert "coordinator" not in look_here()
    assert look_here(Scheduler())["coordinator"] == ""


@pytest.mark.parametrize(
    ("visible", "devices", "has_cuda", "device"),
    [
        (None, (), True, "cpu"),
        (None, ("nvidia0", "nvidiactl"), True, "cuda:0"),
        (None, ("nvidia0",), False, "cpu"),
        (None, ("nvidiactl", "nvidia-uvm"), True, "cpu"),
        ("3", (), True, "cuda:0"),
        ("3", (), False, "cpu"),
        ("", ("nvidia0",), True, "cpu"),
        ("-1", ("nvidia0",), True, "cpu"),
    ],
)
def test_device_is_what_torch_will_find(
    visible: str | None,
    devices: tuple[str, ...],
    has_cuda: bool,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(guest_worker, "DEVICES", tmp_path)
    monkeypatch.setattr(guest_worker, "torch_has_cuda", lambda: has_cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_device() == device
