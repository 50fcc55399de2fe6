"""A worker decides whether its job has something to do, before it connects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.slurm.machine import job_worker
from etrain_jupyter.plugins.slurm.site import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path / "slurm-a-1")
    site.path.mkdir()
    line = f"prog tls://127.0.0.1:1 --name w1 --nthreads 1 --memory-limit 1GiB --folder {site.path}"
    options = "--device cpu --supervisor m:S --away-s 300 --kill-wait-s 30"
    monkeypatch.setattr("sys.argv", [*line.split(), *options.split()])
    for name in ("SLURM_RESTART_COUNT", "ETRAIN_SIGTERM", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return site


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    ran: list[dict[str, Any]] = []
    monkeypatch.setattr(job_worker, "run_worker", lambda *_, **options: ran.append(options))
    monkeypatch.setattr(job_worker, "_hold_stdin_open", lambda: None)
    return ran


def test_worker_connects_to_the_newest_scheduler(
    site: Site, ran: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    site.publish("tls://127.0.0.1:9", num_lives=2)

    job_worker.main()

    [options] = ran
    assert (options["scheduler"], options["num_lives"]) == ("tls://127.0.0.1:9", 2)
    assert (options["host"], options["kill_wait_s"]) == ("127.0.0.1", 30.0)
    assert options["scratch"].stat().st_mode & 0o777 == 0o700
    # Its trainers inherit these.
    assert os.environ["OMP_NUM_THREADS"] == "6"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["ETRAIN_SIGTERM"] == "ignore"


def test_job_that_waited_longer_than_its_cluster_ran_ends(
    site: Site, ran: list[dict[str, Any]]
) -> None:
    site.publish("tls://127.0.0.1:9", num_lives=1)
    site.retract()

    job_worker.main()

    assert ran == []


def test_requeued_job_ends_because_names_are_not_reused(
    site: Site, ran: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish("tls://127.0.0.1:9", num_lives=1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")

    job_worker.main()

    assert ran == []


@pytest.mark.parametrize("plant", ["open", "link"])
def test_scratch_folder_that_another_user_may_have_prepared_ends_the_worker_with_the_remedy(
    site: Site, ran: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], plant: str
) -> None:
    site.publish("tls://127.0.0.1:9", num_lives=1)
    site.scratch.mkdir(exist_ok=True)
    scratch = site.scratch / f"{site.path.name}-w1"
    if plant == "link":
        scratch.symlink_to(site.path)
    else:
        scratch.mkdir()
        scratch.chmod(0o777)

    with pytest.raises(SystemExit) as ended:
        job_worker.main()

    assert (ended.value.code, ran) == (1, [])
    assert capsys.readouterr().err.endswith(
        f"the scratch folder {scratch} cannot be used: another user may have prepared it: it is "
        "not a folder of this user alone. The worker exits. Remove this folder, or write another "
        "local_directory: PATH in pools.yaml\n"
    )


def test_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    for name in ("ca.pem", "worker.pem", "worker.key"):
        (tmp_path / name).write_text("text")
    site = Site(tmp_path / "shared" / "slurm-a-1")
    site.path.mkdir(parents=True)
    site.path.chmod(0o777)

    with pytest.raises(PoolError, match="others can write to it"):
        site.prepare(tmp_path)


def test_folder_that_cannot_be_created_is_reported_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(PoolError, match=r"cannot be created.*Write folder: PATH"):
        Site(tmp_path / "file" / "slurm-a-1").prepare(tmp_path)
