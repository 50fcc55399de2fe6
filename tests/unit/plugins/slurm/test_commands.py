"""Calls of SLURM's commands, with the simulated SLURM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.slurm import commands
from etrain_jupyter.plugins.slurm.commands import SlurmError
from etrain_jupyter.plugins.slurm.simulator import FakeSlurm

HEADER = "#!/bin/bash\n#SBATCH -J slurm-a-1.w1\n#SBATCH -t 00:10:00\n"
SLEEP = HEADER + "exec sleep 1000\n"


@pytest.fixture(scope="module")
def process() -> Iterator[FakeSlurm]:
    with FakeSlurm(num_nodes=2, kill_wait_s=1.0) as slurm:
        yield slurm


@pytest.fixture
def slurm(process: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    monkeypatch.setenv("PATH", process.path)
    yield process
    process.refuse("")
    process.set_down(False)
    commands.cancel_all("", timeout_s=30.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of(slurm: FakeSlurm, job_id: str) -> str:
    return next(str(job["state"]) for job in slurm.jobs() if job["id"] == job_id)


def test_submitted_job_is_listed_until_it_is_cancelled(slurm: FakeSlurm, tmp_path: Path) -> None:
    id = commands.submit(SLEEP, folder=tmp_path)
    until(lambda: commands.list_jobs("slurm-a-1.")[0].is_running)

    [job] = commands.list_jobs("slurm-a-1.")
    assert (job.job_id, job.worker, job.node[:4]) == (id, "w1", "node")
    assert 0.0 < job.left_s <= 600.0
    assert commands.list_jobs("slurm-b-") == []

    commands.cancel([id])
    until(lambda: commands.list_jobs("") == [])
    commands.cancel([id])  # it has ended
    commands.cancel(["999"])  # it never existed
    assert commands.cancel_all("slurm-a-", timeout_s=1.0) == []


def test_third_job_waits_for_a_node(slurm: FakeSlurm, tmp_path: Path) -> None:
    ids = [commands.submit(SLEEP, folder=tmp_path) for _ in range(3)]
    until(lambda: sum(job.is_running for job in commands.list_jobs("")) == 2)

    pending = commands.list_jobs("")[2]
    assert (pending.job_id, pending.used_s, pending.node) == (ids[2], 0.0, "")
    assert pending.reason == "Resources"
    assert commands.cancel_all("", timeout_s=30.0) == []


def test_job_gets_the_submitters_environment_but_not_that_of_an_enclosing_job(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    monkeypatch.setenv("ETRAIN_CLUSTER_ID", "slurm-a-1")

    commands.submit(HEADER + "env > out; pwd >> out; mv out said\n", folder=tmp_path)
    until((tmp_path / "said").exists)

    said = (tmp_path / "said").read_text().splitlines()
    assert "MINE=kept" in said
    assert str(tmp_path) in said
    assert not [line for line in said if line.startswith(("SLURM_MEM", "ETRAIN_CLUSTER_ID"))]


def test_signal_and_sigkill_arrive_in_time_order(slurm: FakeSlurm, tmp_path: Path) -> None:
    script = (
        "#!/bin/bash\n#SBATCH --signal=B:USR1@300\n#SBATCH -t 00:10:00\n"
        "trap 'echo usr1 >> said' USR1\ntrap 'echo term >> said' TERM\ntouch ready\n"
        "while true; do sleep 0.01; done\n"
    )
    id = commands.submit(script, folder=tmp_path)
    until((tmp_path / "ready").exists)
    slurm.set_time_left(id, 0.2)

    until(lambda: state_of(slurm, id) == "TO")

    assert (tmp_path / "said").read_text() == "usr1\nterm\n"
    assert "CANCELLED AT" in (tmp_path / f"slurm-{id}.out").read_text()


@pytest.mark.parametrize(("option", "state"), [("--requeue", "R"), ("--no-requeue", "PR")])
def test_preempted_job_is_requeued_only_on_request(
    slurm: FakeSlurm, tmp_path: Path, option: str, state: str
) -> None:
    script = f"#!/bin/bash\n#SBATCH {option}\necho $SLURM_RESTART_COUNT >> said\nexec sleep 1000\n"
    id = commands.submit(script, folder=tmp_path)
    until((tmp_path / "said").exists)

    slurm.preempt(id, grace_s=0.0)

    until(
        lambda: (
            state_of(slurm, id) == state and (tmp_path / "said").read_text()[-2:] == "1\n"
            if state == "R"
            else state_of(slurm, id) == state
        )
    )
    assert (tmp_path / "said").read_text() == ("0\n1\n" if state == "R" else "0\n")


def test_refusals_are_told_apart(slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="Invalid partition name specified") as wrong:
        commands.submit("#!/bin/bash\n#SBATCH -p nowhere\n", folder=tmp_path)
    with pytest.raises(SlurmError, match="unrecognized arguments: --nonsense"):
        commands.submit("#!/bin/bash\n#SBATCH --nonsense=3\n", folder=tmp_path)
    slurm.refuse("Job violates accounting/QOS policy (job submit limit, user's size and/or time)")
    with pytest.raises(SlurmError) as full:
        commands.submit(SLEEP, folder=tmp_path)
    slurm.set_down(True)
    with pytest.raises(SlurmError, match="Unable to contact slurm controller") as down:
        commands.list_jobs("")

    assert [one.value.is_transient for one in (wrong, full, down)] == [False, True, True]


def test_missing_commands_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(PoolError, match="sbatch and squeue and scancel not found in PATH"):
        commands.check_commands()


OWN = b"17|slurm-a-1.w1|R|59:00|1:00|n1|None\n"


@pytest.mark.parametrize(
    ("listed", "ids"),
    [
        pytest.param(b"18|M\xfcller|R|59:00|1:00|n1|None\n" + OWN, ["17"], id="not UTF-8"),
        pytest.param(b"--user=root|slurm-a-1.w1|R|1:00|1:00|n|None\n", [], id="id is an option"),
        pytest.param(b"17_[1-3%2]|slurm-a-1.w1|R|1:00|1:00|n|None\n", ["17_[1-3%2]"], id="array"),
        pytest.param(b"17+1|slurm-a-1.w1|R|1:00|1:00|n|None\n", ["17+1"], id="heterogeneous"),
        pytest.param(OWN.replace(b"17", b"7" * 6000) + OWN, ["17"], id="id of 6,000 digits"),
        pytest.param(OWN.replace(b"17", b"17_" + b"7" * 6000), [], id="task of 6,000 digits"),
        pytest.param(OWN.replace(b"59:00", b"9" * 6000 + b":00"), ["17"], id="6,000 digits"),
    ],
)
def test_other_output_of_squeue_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bytes, ids: list[str]
) -> None:
    (tmp_path / "out").write_bytes(listed)
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {tmp_path}/out\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert [job.job_id for job in commands.list_jobs("slurm-a-1.")] == ids
