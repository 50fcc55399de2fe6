"""Plug-ins of this package and of others are found, loaded on first use, and left out if broken."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etrain_jupyter import plugin
from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.log.loggers.registry import logger_names
from etrain_jupyter.pools import own_clusters
from etrain_jupyter.pools.registry import get_pool, pool_of
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings
from tests.acme_package import install_acme

POOLS = "gpus:\n  kind: acme\n  slots: 2\n"


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a plug-in of another package; return the working folder."""
    install_acme(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    (tmp_path / "pools.yaml").write_text(POOLS)
    return tmp_path


def etrain(*words: str) -> str:
    command = [sys.executable, "-c", "from etrain_jupyter.cli import main; main()", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_reference_names_an_attribute_or_a_method() -> None:
    assert plugin.load("pathlib:Path") is Path
    assert plugin.load("pathlib:Path.cwd")() == Path.cwd()
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        plugin.load("no_such_module:Thing")


def test_every_reference_of_our_plug_ins_can_be_loaded() -> None:
    settings = ClusterSettings()
    references = [settings.coordinator, settings.supervisor, settings.nodes]
    for one in plugin.installed().values():
        references += [
            one.words,
            one.notices,
            one.service,
            *one.public.values(),
            *one.loggers.values(),
        ]
        references += [part for each in one.commands for part in (each.run, each.cell)]
        for cell in one.cells.values():
            references += [cell.run, cell.parser, cell.help, cell.group]
        for kind in one.pools.values():
            references += [kind.make, kind.of_cluster, kind.address_of]
            references += [kind.check, kind.find, kind.check_all]

    for reference in filter(None, references):
        assert plugin.load(reference) is not None


@pytest.mark.plugins
def test_looking_for_plug_ins_loads_no_library_of_theirs() -> None:
    code = (
        "import sys; from etrain_jupyter import plugin; print(len(plugin.installed()));"
        "print({'boto3', 'optuna', 'mlflow', 'wandb', 'dask_jobqueue', 'torch'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["5", "set()"]


def test_sub_command_of_another_package(acme: Path) -> None:
    names = [line.split()[0] for line in etrain("--help").splitlines()[1:]]

    assert names[names.index("show") + 1] == "greet"
    assert etrain("greet", "Ada", "--loud") == "hello Ada!\n"
    assert "who is greeted" in etrain("greet", "--help")


def test_pool_of_another_package(acme: Path) -> None:
    pool = get_pool("gpus")

    assert pool.price(3) == "3 favours"
    assert "gpus: acme" in etrain("pools")
    (acme / "pools.yaml").write_text("gpus: {kind: acne}\n")
    with pytest.raises(ConfigError) as caught:
        get_pool("gpus")
    assert caught.value.hint == "did you mean 'acme'?"


def test_cluster_belongs_to_the_kind_of_its_prefix(acme: Path) -> None:
    settings = ClusterSettings(pool="gpus", prefix="acme-pool")
    cluster = ClusterDir.create(acme / "state", settings)
    unknown = ClusterDir.create(acme / "state", ClusterSettings(prefix="azure-pool"))
    (acme / "state" / "notes-of-mine").mkdir()

    assert {one.cluster_id for one in cluster_dirs()} == {cluster.cluster_id, unknown.cluster_id}
    assert own_clusters.find_cluster_dir(cluster.cluster_id) is not None
    assert plugin.kind_of(cluster.cluster_id).make == "acme_etrain:make_pool"
    assert type(pool_of(cluster)).__name__ == "AcmePool"
    with pytest.raises(PoolError, match="a kind of pool that is not installed"):
        pool_of(unknown)


@pytest.mark.plugins
def test_broken_plug_in_is_left_out_with_a_warning(
    acme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = plugin.installed()

    assert list(found) == ["ec2", "planner", "search", "slurm", "trackers", "acme"]
    assert "the plug-in 'missing' (acme_etrain:NOTHING) is not used" in caplog.text


@pytest.mark.plugins
def test_another_package_cannot_replace_a_logger_of_ours(
    acme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = plugin.Plugin(loggers={"mlflow": "acme_etrain:AcmeLogger", "other": "a:B"})
    ours = plugin.installed()
    monkeypatch.setattr(plugin, "installed", lambda: {**ours, "theirs": theirs})

    assert plugin.loggers()["mlflow"] == ours["trackers"].loggers["mlflow"]
    assert {"acme", "other"} < set(logger_names())
    assert os.environ["PYTHONPATH"].startswith(str(acme))
