"""Drive studies whose jobs are played by the test: no workers, but Optuna and its journal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.log import events as e
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.plugins.search.cell import parse_search_cell
from etrain_jupyter.plugins.search.driver import StudyDriver
from etrain_jupyter.plugins.search.folder import import_optuna
from etrain_jupyter.plugins.search.optuna_study import OptunaStudy, make_pruner
from etrain_jupyter.plugins.search.spec import StudySpec
from tests.unit.log.spent import PLAIN_STEP

pytestmark = pytest.mark.usefixtures("private_state")

BODY = """\
model: Net(width)
data: {train: train_set, eval: eval_set}
loss: loss
metrics: {accuracy: loss}
seed: !py width
batch: 10
epochs: 16
search:
  space: {width: {int: [1, 1000]}, lr: {low: 1, high: 2}}
  metric: accuracy
  mode: max
"""
NAMES = {"Net": lambda width, lr: None, "train_set": [0], "eval_set": [0], "loss": print}
LENGTH = 100
PLAN: dict[str, Any] = {
    "num_train_samples": LENGTH,
    "num_eval_samples": 1,
    "global_batch_size": 10,
    "steps_per_epoch": 10,
    "total_steps": 160,
    "total_samples": 16 * LENGTH,
    "num_parameters": 10,
    "num_trained_parameters": 10,
}


def step_values(step: int) -> dict[str, Any]:
    """Return the fields of the last step of an epoch."""
    return {
        "step": step, "epoch": step // 10 - 1, "first": 90, "samples": 10, "sample_checksum": 0,
        "loss": 1.0, "lr": 0.1, "world_size": 1, "samples_per_s": 1.0, **PLAIN_STEP,
    }  # fmt: skip


def eval_values(step: int, value: float) -> dict[str, Any]:
    """Return the fields of the evaluation after it."""
    return {
        "step": step, "epoch": step // 10 - 1, "samples": 1, "loss": 1.0, "duration_s": 0.0,
        "metrics": {"accuracy": value},
    }  # fmt: skip


@pytest.fixture
def private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))


def spec_of(root: Path, *, more: str = "", **changes: Any) -> StudySpec:
    body = BODY.replace("Net(width)", "Net(width, lr)") + more
    parsed = parse_search_cell(body, namespace=NAMES)
    folder = root / "study-00c0ffee"
    folder.mkdir(exist_ok=True)
    (folder / "bundle").write_bytes(b"objects")
    values: dict[str, Any] = {
        "study_id": folder.name,
        "name": "study",
        "folder": str(folder),
        "search": parsed.search.model_dump(mode="json"),
        "space": {name: p.model_dump(mode="json") for name, p in parsed.space.items()},
        "num_trials": 4,
        "template": vars(parsed.template),
        "job": {"bundle_digest": "d", "bundle_size": 7},
        "record": {"pool": "local", "bundle_digest": "d", "cwd": ""},
    }
    return StudySpec.from_message(values | changes)


class Host:
    """Records jobs, and plays their events: ``curve`` returns the accuracy by width and epoch."""

    def __init__(self, curve: Callable[[int, int], float] | None, *, capacity: int = 2) -> None:
        self.is_ready = True
        self.capacity = capacity
        self.orders: list[Any] = []
        self.jobs: dict[str, Any] = {}
        self.stopped: list[str] = []
        self.curve = curve
        self.num_before_stops = 0
        self.driver: StudyDriver | None = None
        self.tasks: list[asyncio.Task[None]] = []

    def find_job(self, job_id: str) -> Any:
        return self.jobs.get(job_id)

    def after_change(self) -> None:
        pass

    async def host_job(self, order: Any) -> None:
        assert order.job_id not in [known.job_id for known in self.orders]
        self.orders.append(order)
        job = SimpleNamespace(
            state=SimpleNamespace(is_ended=False),
            log=lambda kind, **values: None,
            handle=lambda stimulus: self.stopped.append(order.job_id),
        )
        self.jobs[order.job_id] = job
        self.tasks.append(asyncio.create_task(self.play(order, job)))

    async def play(self, order: Any, job: Any) -> None:
        log = EventLog(order.log_path)

        def tell(kind: type[e.Event], **values: Any) -> None:
            [event] = log.append([kind(job_id=order.job_id, time=0.0, generation=1, **values)])
            assert self.driver is not None
            self.driver.take_events(order.job_id, [event])

        tell(e.JobPlanned, **PLAN)
        status = "finished"
        for epoch in range(16):
            if self.curve is None:
                tell(e.UserErrorRaised, error="ValueError: no", traceback="", workers=[])
                status = "failed"
                break
            step = 10 * (epoch + 1)
            tell(e.StepCompleted, **step_values(step))
            value = self.curve(order.config["seed"], epoch)
            tell(e.EvalCompleted, **eval_values(step, value))
            # A study that ends takes no more news, but waits until this job has ended.
            while self.driver and self.driver._news and order.job_id not in self.stopped:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.03)
            if order.job_id in self.stopped:
                status = "stopped"
                # Still saving its checkpoint, until the test has seen that many jobs.
                while len(self.orders) < self.num_before_stops:
                    await asyncio.sleep(0.005)
                break
        job.state.is_ended = True
        tell(e.JobStatusChanged, status=status)
        log.close()


async def drive(spec: StudySpec, host: Host, *, until: Callable[[], bool] | None = None) -> Any:
    ended = asyncio.Event()
    host.driver = StudyDriver(spec, host, on_end=lambda _: ended.set())  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        while not ended.is_set() and not (until and until()):
            await asyncio.sleep(0.005)
    return host.driver


async def die(driver: StudyDriver) -> None:
    """End the driver as the death of its process does; its jobs continue."""
    driver.task.cancel()
    await asyncio.gather(driver.task, return_exceptions=True)
    driver._thread.shutdown(wait=True)


def run(spec: StudySpec, host: Host) -> OptunaStudy:
    asyncio.run(drive(spec, host))
    return OptunaStudy(spec)


def test_poor_trials_end_at_rungs_and_the_best_completes(tmp_path: Path) -> None:
    host = Host(lambda width, epoch: width + epoch / 100)

    trials = run(spec_of(tmp_path, num_trials=8), host).trials()

    complete = [t for t in trials if t.state == "COMPLETE"]
    pruned = [t for t in trials if t.state == "PRUNED"]
    assert len(complete) + len(pruned) == 8
    assert pruned
    assert max(t.values["width"] for t in trials) in [t.values["width"] for t in complete]
    assert all("pruned at rung 1 of 2" in t.reason or "rung 2" in t.reason for t in pruned)
    assert {t.job_id for t in trials} == {order.job_id for order in host.orders}
    assert all(t.samples < 16 * LENGTH for t in pruned)


def test_decisions_are_those_of_optuna_alone_on_the_same_values(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_trials=9)
    trials = run(spec, Host(lambda width, epoch: (width * 37 % 11) + epoch, capacity=1)).trials()
    optuna = import_optuna()
    alone = optuna.create_study(direction="maximize", pruner=make_pruner(optuna, (100, 400), 4))

    for ours in trials:
        trial = alone.ask()
        state = "COMPLETE"
        for samples, value in sorted(ours.reported.items()):
            trial.report(value, samples)
            if samples < 1600 and trial.should_prune():
                state = "PRUNED"
                assert samples == max(ours.reported)
        value = 0.0 if state == "COMPLETE" else None
        alone.tell(trial, value, state=optuna.trial.TrialState[state])
        assert state == ours.state


def test_restarted_scheduler_runs_no_trial_twice_and_loses_none(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_trials=4)
    host = Host(lambda width, epoch: float(width))

    async def two_lives() -> None:
        driver = await drive(spec, host, until=lambda: len(host.orders) == 3)
        await die(driver)
        await drive(spec, host)

    asyncio.run(two_lives())

    trials = OptunaStudy(spec).trials()
    assert [t.number for t in trials] == [0, 1, 2, 3]
    assert len({order.job_id for order in host.orders}) == len(host.orders) == 4
    assert all(t.state in ("COMPLETE", "PRUNED") for t in trials)


def test_clock_that_is_set_forward_does_not_use_up_the_time_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time

    def jump(width: int, epoch: int) -> float:
        if epoch == 2:
            monkeypatch.setattr(time, "time", lambda: now() + 26 * 3600)
        return float(width)

    trials = run(spec_of(tmp_path, more="  budget: {time: 1 h}\n"), Host(jump)).trials()

    assert [t.number for t in trials] == [0, 1, 2, 3]
    assert [t.reason for t in trials if "budget" in t.reason] == []


def test_study_stops_if_all_of_its_first_trials_fail(tmp_path: Path) -> None:
    host = Host(None, capacity=1)

    stored = run(spec_of(tmp_path), host)

    assert [t.state for t in stored.trials()] == ["FAIL"] * 3
    assert stored._study.user_attrs["status"] == "running"  # reopened by this test
    assert host.driver is not None
    assert host.driver.verdict is not None
    assert host.driver.verdict.reason == "all 3 trials failed; the last one with: ValueError: no"


def test_configuration_that_cannot_be_built_fails_its_trial_alone(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    template = dict(spec.template)
    template["computed"] = {"/seed": "width if width % 2 else 0 - width"}
    host = Host(lambda width, epoch: 1.0)

    trials = run(spec_of(tmp_path, template=template, num_trials=6), host).trials()

    failed = [t for t in trials if t.state == "FAIL"]
    assert {t.number for t in failed} == {t.number for t in trials if t.values["width"] % 2 == 0}
    assert 0 < len(failed) < 6
    assert all("seed must be 0 or more" in t.reason for t in failed)


def test_trial_without_the_metric_fails_with_the_names_that_were_reported(tmp_path: Path) -> None:
    host = Host(lambda width, epoch: float("nan"), capacity=1)

    run(spec_of(tmp_path, num_trials=1), host)

    assert host.driver is not None
    assert host.driver.verdict is not None
    assert "no evaluation reported a finite 'accuracy'" in host.driver.verdict.reason


def test_grid_runs_each_combination_once(tmp_path: Path) -> None:
    search = {"method": "grid", "metric": "accuracy", "mode": "max"}
    space = {"width": {"choice": [3, 5]}, "lr": {"choice": [1.0, 2.0]}}
    host = Host(lambda width, epoch: 1.0)

    trials = run(spec_of(tmp_path, search=search, space=space), host).trials()

    tried = sorted((t.values["width"], t.values["lr"]) for t in trials)
    assert tried == [(3, 1.0), (3, 2.0), (5, 1.0), (5, 2.0)]
    assert {t.state for t in trials} == {"COMPLETE"}


def test_values_do_not_depend_on_restarts(tmp_path: Path) -> None:
    for name in ("once", "thrice"):
        (tmp_path / name).mkdir()
    once = OptunaStudy(spec_of(tmp_path / "once"))

    expected = [once.ask().values for _ in range(3)]
    found = [OptunaStudy(spec_of(tmp_path / "thrice")).ask().values for _ in range(3)]

    assert found == expected


def test_successor_of_a_pruned_trial_starts_while_that_trial_still_saves(tmp_path: Path) -> None:
    host = Host(lambda width, epoch: float(-width), capacity=1)
    host.num_before_stops = 4

    trials = run(spec_of(tmp_path, num_trials=4), host).trials()

    # Otherwise, the study would wait for ever: no pruned trial ends before the last one begins.
    assert [t.state for t in trials].count("PRUNED") > 0
    assert len(trials) == 4


def test_scheduler_that_dies_at_any_write_of_a_decision_prunes_the_trial_at_the_same_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = ["set_trial_user_attr", "set_trial_system_attr", "set_trial_intermediate_value"]
    for num_writes, name in enumerate(writes):
        (tmp_path / name).mkdir()
        spec = spec_of(tmp_path / name)
        store = OptunaStudy(spec)
        store.place_rungs(num_samples=1600, min_samples=100)
        good, poor = store.ask().number, store.ask().number
        assert store.report(good, 100, 0.9) == ""
        with monkeypatch.context() as patch:
            patch.setattr(store._storage, name, _die)
            with pytest.raises(SystemExit):
                store.report(poor, 100, 0.1)

        again = OptunaStudy(spec)
        stored = again.trials()[poor]
        assert bool(stored.reason) == (num_writes > 0)
        assert again.report(poor, 100, 0.1) or stored.reason
        assert again.trials()[poor].reason.startswith("pruned at rung 1 of 2 with 0.1")
        assert again.trials()[poor].reported == {100: 0.1}
        assert again.report(good, 400, 0.9) == ""


def _die(*_: Any) -> None:
    raise SystemExit


@pytest.mark.parametrize("method", ["grid", "random", "tpe"])
def test_scheduler_that_dies_at_any_write_chooses_the_same_trials(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "calm").mkdir()
    expected = _finish(method_spec_of(tmp_path / "calm", method))
    for num_writes in range(1, 100):
        (root := tmp_path / str(num_writes)).mkdir()
        spec = method_spec_of(root, method)

        is_alive = _ask_and_die(spec, num_writes)

        assert _finish(spec) == expected
        if is_alive:
            break
    assert 10 < num_writes < 99


def test_trial_whose_values_were_not_all_chosen_runs_once(tmp_path: Path) -> None:
    spec = method_spec_of(tmp_path, "random")
    num_writes = 0
    while (stored := OptunaStudy(spec).trials()) == [] or not stored[-1].values:
        (tmp_path / "study-00c0ffee" / "optuna.journal").unlink(missing_ok=True)
        num_writes += 1
        assert not _ask_and_die(spec, num_writes)
    assert (len(stored), stored[0].job_id, len(stored[0].values)) == (1, "", 1)

    asyncio.run(drive(spec, host := Host(lambda width, epoch: 1.0)))

    assert [t.state for t in OptunaStudy(spec).trials()] == ["COMPLETE"] * 4
    assert len(host.orders) == 4


def method_spec_of(root: Path, method: str) -> StudySpec:
    search = {"method": method, "metric": "accuracy", "mode": "max"}
    choices = {"width": {"choice": [3, 5]}, "lr": {"choice": [1.0, 2.0]}}
    return spec_of(root, search=search, **({"space": choices} if method == "grid" else {}))


def _finish(spec: StudySpec) -> list[tuple[int, Any, str]]:
    """Choose the values of the trials that are left; return all four."""
    store = OptunaStudy(spec)
    for trial in store.trials():
        if not trial.job_id:
            store.complete(trial)
    while len(store.trials()) < 4:
        store.ask()
    return [(t.number, t.values, t.job_id) for t in store.trials()]


def _ask_and_die(spec: StudySpec, num_writes: int) -> bool:
    """Begin two trials, but die before a write to the journal; return whether it did not die."""
    backend = import_optuna().storages.journal.JournalFileBackend
    append, left = backend.append_logs, num_writes

    def append_or_die(self: Any, logs: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            _die()
        append(self, logs)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(backend, "append_logs", append_or_die)
        store = OptunaStudy(spec)
        store.ask()
        store.ask()
        return True
    return False


def test_recovered_decision_stores_its_value_and_ends_the_trial(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_trials=1)
    store = OptunaStudy(spec)
    store.place_rungs(num_samples=1600, min_samples=100)
    trial = store.ask()
    store._storage.set_trial_user_attr(store._frozen(0)._trial_id, "reason", "pruned at rung 1")
    order = spec.make_job(0, spec.build_config(trial.values), resumes=False)
    with contextlib.closing(EventLog(order.log_path)) as log:
        common = {"job_id": order.job_id, "time": 0.0, "generation": 1}
        log.append(
            [
                e.JobPlanned(**common, **PLAN),
                e.StepCompleted(**common, **step_values(10)),
                e.EvalCompleted(**common, **eval_values(10, 0.3)),
            ]
        )

    asyncio.run(drive(spec, host := Host(lambda width, epoch: 1.0)))

    [found] = OptunaStudy(spec).trials()
    assert (found.state, found.reason) == ("PRUNED", "pruned at rung 1")
    assert found.reported == {LENGTH: 0.3}
    assert host.orders == []


@pytest.mark.parametrize(
    ("method", "written"),
    [("grid", 0.5), ("tpe", 0.5), ("random", 1.0)],
    ids=["half a line", "half a line, pruned", "the line, but not its sync"],
)
def test_full_disk_at_every_write_changes_no_trial_and_stops_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, written: float
) -> None:
    monkeypatch.setattr("etrain_jupyter.plugins.search.driver.TICK_S", 0.002)
    found = []
    for name in ("calm", "full"):
        (tmp_path / name).mkdir()
        host = Host(lambda width, epoch: -width + epoch / 100, capacity=1)
        with monkeypatch.context() as patch:
            if name == "full":
                fail_each_write_once(patch, written)
            store = run(method_spec_of(tmp_path / name, method), host)
        found.append([(t.values, t.state, t.reason, t.reported) for t in store.trials()])
        assert host.driver is not None
        assert host.driver.verdict is not None
        assert host.driver.verdict.status == "finished"
        assert len(host.stopped) == sum(t.state == "PRUNED" for t in store.trials())

    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_full_disk_is_shown_until_the_journal_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_each_write_once(monkeypatch, 0.5)
    shown: list[str] = []

    async def drive_and_watch() -> None:
        ended = asyncio.Event()
        host = Host(lambda width, epoch: 1.0)
        host.driver = StudyDriver(
            spec_of(tmp_path, num_trials=1), host, on_end=lambda _: ended.set(),  # type: ignore[arg-type]
            on_trouble=shown.append,
        )  # fmt: skip
        await ended.wait()

    monkeypatch.setattr("etrain_jupyter.plugins.search.driver.TICK_S", 0.002)
    asyncio.run(drive_and_watch())

    assert shown[0].startswith("optuna.journal cannot be written: No space left on device (")
    assert shown[0].endswith("free space there, and writing continues")
    assert shown[1] == shown[-1] == ""


def fail_each_write_once(patch: pytest.MonkeyPatch, written: float) -> None:
    """Make the disk full for the first write of each kind, of which it takes this fraction."""
    backend = import_optuna().storages.journal.JournalFileBackend
    append, failed = backend.append_logs, set()

    def append_or_fail(self: Any, logs: Any) -> None:
        names = [list(logs[0].get(kind, ())) for kind in ("user_attr", "system_attr")]
        keys = ("op_code", "trial_id", "param_name", "step")
        what = str(([logs[0].get(key) for key in keys], names))
        if what not in failed:
            failed.add(what)
            line = (json.dumps(logs[0], separators=(",", ":")) + "\n").encode()
            with open(self._file_path, "ab") as file:
                file.write(line[: int(len(line) * written)])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, logs)

    patch.setattr(backend, "append_logs", append_or_fail)


def test_stop_ends_the_jobs_although_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(lambda width, epoch: 1.0)
    backend = import_optuna().storages.journal.JournalFileBackend

    def refuse(self: Any, logs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def stop_on_a_full_disk() -> None:
        driver = await drive(spec_of(tmp_path), host, until=lambda: len(host.orders) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "append_logs", refuse)
            driver.stop("stopped by the user")
            async with asyncio.timeout(10):
                while len(set(host.stopped)) < 2:
                    await asyncio.sleep(0.005)
            assert not driver.task.done()
        await driver.task

    asyncio.run(stop_on_a_full_disk())
