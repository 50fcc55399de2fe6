"""A plug-in of another package: a job trains on its pool and writes to its logger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import etrain_jupyter
from etrain_jupyter.pools import clusters
from tests.acme_package import install_acme, losses_of, status_of
from tests.integration.conftest import processes_of
from tests.integration.slow_jobs import make_data, make_model, slow_loss, until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the plug-in and define a pool; assert that no process is left."""
    install_acme(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    (tmp_path / "pools.yaml").write_text("gpus: {kind: acme, slots: 2}\n")
    yield tmp_path
    clusters.down(all_clusters=True)
    assert processes_of(tmp_path) == []


def test_job_trains_on_the_pool_of_another_package(folder: Path) -> None:
    job = etrain_jupyter.distributed(
        model=make_model,
        data={"train": make_data},
        loss=slow_loss,
        batch={"global": 16},
        steps=12,
        workers={"min": 2, "max": 2},
        pool="gpus",
        log={"to": {"acme": {"folder": str(folder / "boards")}}},
    )

    assert job.wait(150.0) == "finished"
    assert job.audit().ok
    assert job.record.cluster["cluster_id"].startswith("acme-pool-")
    assert job.record.cluster["cluster_id"] in clusters.describe_pools()
    until(lambda: status_of(folder / "boards"), "the end of the logger")
    assert [loss for _, loss in losses_of(folder / "boards")] == list(job.history()["loss"])
    assert clusters.down("gpus").endswith("has ended")
