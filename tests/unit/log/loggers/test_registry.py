"""Loggers are found by name, and errors in their options point at the line of the cell."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.config import parse_cell, parse_mapping
from etrain_jupyter.errors import CellError, ConfigError
from etrain_jupyter.log.loggers.base import LoggerEntry
from etrain_jupyter.log.loggers.registry import logger_names, make_logger, with_loggers
from etrain_jupyter.plugins.trackers.mlflow_logger import MlflowLogger, metric_key, params_of
from etrain_jupyter.plugins.trackers.wandb_logger import WandbLogger
from tests.acme_package import install_acme

CELL = "model: Net()\ndata: {train: train_set}\nloss: loss\n"
VARIABLES = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_NAME",
    "WANDB_DIR",
    "WANDB_ENTITY",
    "WANDB_MODE",
    "WANDB_PROJECT",
)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, as if all libraries were installed; return the folder."""
    monkeypatch.setattr(LoggerEntry, "require", lambda self, module, *, extra: None)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loggers_of(log: str) -> dict[str, dict[str, Any]]:
    return with_loggers(parse_cell(f"{CELL}{log}\n", namespace={})).log.to


def error_of(log: str) -> CellError:
    with pytest.raises(CellError) as caught:
        loggers_of(log)
    return caught.value


def test_cell_names_loggers_in_three_forms(environment: Path) -> None:
    mlflow = {"uri": f"sqlite:///{environment}/mlflow.db", "experiment": "Default", "tags": {}}
    wandb = {
        "project": "etrain",
        "entity": "",
        "mode": "online",
        "folder": str(environment),
        "tags": [],
    }

    assert loggers_of("log: {to: mlflow}") == {"mlflow": mlflow}
    assert loggers_of("log: {to: [mlflow, wandb]}") == {"mlflow": mlflow, "wandb": wandb}
    assert loggers_of("log: {to: {wandb: true, mlflow: {experiment: digits}}}") == {
        "wandb": wandb,
        "mlflow": {**mlflow, "experiment": "digits"},
    }
    assert loggers_of("log: {every: 2}") == {}


def test_paths_and_the_environment_are_resolved_in_the_notebook(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "runs")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "vision")

    found = loggers_of("log: {to: {mlflow: true, wandb: {folder: ~/w}, tensorboard: {folder: b}}}")

    assert found["mlflow"]["uri"] == (environment / "runs").as_uri()
    assert found["mlflow"]["experiment"] == "digits"
    assert found["wandb"]["mode"] == "offline"
    assert found["wandb"]["project"] == "vision"
    assert found["wandb"]["folder"] == str(Path("~/w").expanduser())
    assert found["tensorboard"] == {"folder": str(environment / "b")}


@pytest.mark.parametrize(
    ("uri", "stored"),
    [
        ("http://tracking:5000", "http://tracking:5000"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("sqlite:////data/runs.db", "sqlite:////data/runs.db"),
        ("databricks", "databricks"),
        ("/data/mlruns", "file:///data/mlruns"),
    ],
)
def test_other_addresses_of_mlflow_stay_as_they_are(uri: str, stored: str) -> None:
    assert make_logger("mlflow", {"uri": uri}).options["uri"] == stored


@pytest.mark.parametrize(
    ("log", "position", "message", "hint"),
    [
        (
            "log: {to: mlflw}",
            (5, 11),
            "log.to: unknown logger 'mlflw'",
            "did you mean 'mlflow'?",
        ),
        (
            "log:\n  to:\n    neptune: {}",
            (7, 5),
            "log.to: unknown logger 'neptune'",
            "known loggers: tensorboard, mlflow, wandb; a package that adds 'neptune' must be",
        ),
        (
            "log:\n  to:\n    mlflow: {urri: x}",
            (7, 14),
            "unknown key 'urri'",
            "did you mean 'uri'?",
        ),
        (
            "log: {to: [mlflow, mlflow]}",
            (5, 11),
            "log.to must be a list of different names of loggers",
            "write for example 'to: [mlflow, wandb]'",
        ),
        (
            "log: {to: 3}",
            (5, 11),
            "log.to must be the name of a logger or a group of loggers, not the number 3",
            "write for example 'to: mlflow' or",
        ),
        (
            "log: {to: {mlflow: {tags: {a: 1}}}}",
            (5, 31),
            "tags.a must be a text, not the number 1",
            "put it in quotes",
        ),
        (
            "log: {to: {wandb: {mode: disabled}}}",
            (5, 26),
            "mode: Input should be 'online' or 'offline'",
            "",
        ),
        (
            "log: {to: {wandb: {api_key: secret}}}",
            (5, 29),
            "log.to: the API key of wandb would be stored with the job",
            "remove it, and run `wandb login`",
        ),
        (
            "log: {to: {mlflow: {uri: 'https://me:secret@tracking'}}}",
            (5, 26),
            "log.to: the mlflow uri contains a password, which would be stored with the job",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        ),
        (
            "log: {to: {tensorboard: true}}",
            (5, 12),
            "key 'folder' is missing",
            "add for example 'folder'",
        ),
    ],
)
def test_error_points_at_the_cell(
    log: str, position: tuple[int, int], message: str, hint: str
) -> None:
    error = error_of(log)

    assert (error.line, error.column) == position
    assert str(error).endswith(message)
    assert error.hint.startswith(hint)


def test_error_of_a_mapping_has_the_whole_path() -> None:
    keys = {"model": "Net()", "data": {"train": "train_set"}, "loss": "loss"}

    with pytest.raises(ConfigError, match="unknown key 'urri'") as caught:
        with_loggers(parse_mapping({**keys, "log": {"to": {"mlflow": {"urri": "x"}}}}, {}))

    assert caught.value.path == ("log", "to", "mlflow", "urri")


def test_disabled_wandb_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")

    with pytest.raises(ConfigError, match="WANDB_MODE is 'disabled'"):
        make_logger("wandb", {})


@pytest.mark.parametrize("kind", [MlflowLogger, WandbLogger])
def test_missing_library_is_an_error_with_the_extra(
    kind: type[MlflowLogger] | type[WandbLogger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # `require` checks again
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    name = kind.__name__.removesuffix("Logger").lower()

    with pytest.raises(ConfigError, match=f"{name} needs the package {name}") as caught:
        make_logger(name, {})

    assert caught.value.hint.startswith(f"pip install 'etrain-jupyter[{name}]'")


def test_package_adds_a_logger_with_an_entry_point(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_acme(environment / "site", monkeypatch)

    assert logger_names() == ["tensorboard", "mlflow", "wandb", "acme", "broken"]
    assert loggers_of("log: {to: {acme: {folder: boards}}}") == {"acme": {"folder": "boards"}}
    missing = error_of("log: {to: {acme: {}}}")
    assert (missing.line, missing.column, missing.hint) == (5, 18, "acme: {folder: boards}")
    broken = error_of("log: {to: broken}")
    assert (broken.line, broken.column) == (5, 11)
    assert "'broken' (acme_etrain:Missing) cannot be imported: AttributeError" in str(broken)


def test_configuration_becomes_flat_parameters() -> None:
    config = {"optimizer": {"name": "Adam", "lr": 0.1}, "metrics": {"top-5 (%)": "f"}, "seed": None}

    assert params_of(config) == {
        "optimizer.name": "Adam",
        "optimizer.lr": "0.1",
        "metrics.top-5 ___": "f",
    }
    assert len(params_of({"model": "x" * 9_000})["model"]) == 500
    assert metric_key("eval/" + "m" * 900) == "eval/" + "m" * 245
