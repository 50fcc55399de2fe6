"""Every logger passes the shipped contract, with its real library."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from etrain_jupyter.errors import LoggerError
from etrain_jupyter.log.loggers.base import Exhibit, LoggerEntry, RunInfo
from etrain_jupyter.log.loggers.feed import export_log
from etrain_jupyter.log.loggers.process import follow_elsewhere
from etrain_jupyter.log.loggers.registry import make_logger
from etrain_jupyter.log.tensorboard import TensorBoardFiles
from etrain_jupyter.plugins.trackers import mlflow_logger
from etrain_jupyter.plugins.trackers.mlflow_logger import JOB_TAG, MlflowLogger
from etrain_jupyter.plugins.trackers.wandb_logger import WandbLogger, WandbOptions
from etrain_jupyter.testing.logger_contract import (
    JOB_ID,
    Job,
    LoggerContract,
    MemoryPlace,
    Stored,
    losses,
)
from tests.capabilities import needs_module

GUIDE = Path(__file__).parents[2] / "docs/how-to/log-to-mlflow-and-wandb.md"

# The libraries warn about each other and about future Python versions.
pytestmark = pytest.mark.filterwarnings("ignore")


class TestMemoryLogger(LoggerContract):
    @pytest.fixture(params=[False, True], ids=["append-only", "can-drop"])
    def place(self, request: pytest.FixtureRequest) -> MemoryPlace:
        return MemoryPlace(can_drop=request.param)


class DocumentedPlace:
    """Place of the logger in the guide, which stores values only."""

    has_exhibits = has_notes = has_status = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plugin, code = re.findall(r"(?ms)^```python$(.*?)^```$", GUIDE.read_text(encoding="utf-8"))
        self.names: dict[str, Any] = {}
        exec(compile(plugin, str(GUIDE), "exec"), self.names)
        exec(compile(code, str(GUIDE), "exec"), self.names)

    def make(self) -> Any:
        entry = LoggerEntry(name="acme", values={"folder": str(self.folder)})
        return self.names["AcmeLogger"].from_entry(entry)

    def read(self) -> Stored:
        [file] = self.folder.iterdir()
        stored = Stored()
        for line in file.read_text().splitlines():
            row = json.loads(line)
            step = row.pop("step")
            for tag, value in row.items():
                stored.values.setdefault(tag, []).append((step, value))
        return stored


class TestDocumentedLogger(LoggerContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DocumentedPlace:
        return DocumentedPlace(tmp_path / "acme")


class TensorBoardPlace:
    has_exhibits = True
    has_notes = has_status = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> TensorBoardFiles:
        return TensorBoardFiles(self.folder)

    def read(self) -> Stored:
        from tensorboard.backend.event_processing import (
            event_accumulator,
            plugin_event_accumulator,
        )

        folder = str(self.folder / JOB_ID)
        stored = Stored()
        scalars = event_accumulator.EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
        for tag in scalars.Tags()["scalars"]:
            stored.values[tag] = [(one.step, one.value) for one in scalars.Scalars(tag)]
        # The server of TensorBoard reads figures and texts as tensors.
        others = plugin_event_accumulator.EventAccumulator(folder).Reload()
        for tag in others.Tags()["tensors"]:
            kind, _, name = tag.partition("/")
            if kind in ("figures", "texts", "tables"):
                stored.exhibits[name] = [one.step for one in others.Tensors(tag)]
        return stored


@needs_module("tensorboard")
class TestTensorBoardFiles(LoggerContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> TensorBoardPlace:
        return TensorBoardPlace(tmp_path / "boards")


class MlflowPlace:
    has_exhibits = has_notes = has_status = True

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def make(self) -> MlflowLogger:
        return MlflowLogger(self.uri, "digits", {"team": "vision"})

    def read(self) -> Stored:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name("digits")
        where = f"tags.`{JOB_TAG}` = '{JOB_ID}'"
        [run] = client.search_runs([experiment.experiment_id], filter_string=where)
        assert run.data.tags["team"] == "vision"
        params = {"model": "Net()", "optimizer.name": "Adam", "optimizer.lr": "0.25"}
        assert run.data.params == params
        statuses = {"FINISHED": "finished", "KILLED": "stopped", "FAILED": "failed"}
        stored = Stored(status=statuses.get(run.info.status, ""))
        for key in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, key)
            stored.values[key] = [(one.step, one.value) for one in history]
        notes = {k: v for k, v in run.data.tags.items() if k.startswith("etrain.note.")}
        stored.notes = [notes[key] for key in sorted(notes)]
        for kind in ("figures", "texts", "tables"):
            for folder in client.list_artifacts(run.info.run_id, kind):
                files = client.list_artifacts(run.info.run_id, folder.path)
                steps = [int(Path(file.path).stem.split("_")[1]) for file in files]
                stored.exhibits[Path(folder.path).name] = steps
        return stored


@needs_module("mlflow")
class TestMlflowFiles(LoggerContract):
    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowPlace:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read it
        return MlflowPlace((tmp_path / "mlruns").as_uri())


@needs_module("mlflow", "sqlalchemy", "alembic")
def test_database_is_the_default_destination_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(tmp_path / JOB_ID)
    job.steps(range(1, 4))
    job.exhibits(3)
    options = {"experiment": "digits", "tags": {"team": "vision"}}
    logger = make_logger("mlflow", options)

    export_log(job.path, logger)

    stored = MlflowPlace(logger.options["uri"]).read()
    assert logger.options["uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert stored.values["train/loss"] == losses(1, 3)
    assert stored.exhibits == {"curve": [3], "report": [3], "worst": [3]}
    assert sorted(path.name for path in tmp_path.iterdir()) == [JOB_ID, "mlartifacts", "mlflow.db"]


@needs_module("mlflow", "flask")
class TestMlflowServer(LoggerContract):
    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowPlace]:
        for name, value in {
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "_MLFLOW_SERVER_FILE_STORE": (tmp_path / "server").as_uri(),
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": (tmp_path / "files").as_uri(),
        }.items():
            monkeypatch.setenv(name, value)
        from mlflow.server import app, handlers
        from werkzeug.serving import make_server

        monkeypatch.setattr(handlers, "_tracking_store", None)
        monkeypatch.setattr(handlers, "_artifact_repo", None)
        server = make_server("127.0.0.1", 0, app, threaded=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield MlflowPlace(f"http://127.0.0.1:{server.port}")
        server.shutdown()
        thread.join()
        server.server_close()


@needs_module("mlflow")
def test_server_cannot_choose_a_folder_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = SimpleNamespace(run_id="1", artifact_uri=(tmp_path / "home").as_uri())
    client = MagicMock()
    client.return_value.search_runs.return_value = []
    client.return_value.create_run.return_value = SimpleNamespace(info=info)
    monkeypatch.setattr("mlflow.tracking.MlflowClient", client)
    monkeypatch.setattr(mlflow_logger, "_check_server", lambda uri: None)
    logger = MlflowLogger("http://tracking:5000", "digits")
    logger.open(RunInfo(job_id=JOB_ID, name="digits", created=1.0, config={}, revision=0))

    place: dict[str, Any] = {"number": 0, "step": 1, "time": 1.0}
    load = "ssh-ed25519 AAAA".__str__
    logger.write([Exhibit(**place, name="keys", format="text", size_bytes=16, load=load)])

    client.return_value.log_artifact.assert_not_called()
    tags = client.return_value.log_batch.call_args.kwargs["tags"]
    assert {tag.key: tag.value[:10] for tag in tags}["etrain.files"] == "not stored"


class WandbPlace:
    has_exhibits = has_notes = has_status = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loggers: list[WandbLogger] = []

    def make(self) -> WandbLogger:
        for logger in self.loggers:  # the service process rejects an id that is in use
            logger.close(None)
        options = WandbOptions(project="digits", mode="offline", folder=str(self.folder))
        self.loggers.append(WandbLogger(options))
        return self.loggers[-1]

    def read(self) -> Stored:
        [folder] = (self.folder / "wandb").glob("offline-run-*")
        [file] = folder.glob("run-*.wandb")
        return read_wandb(file)


def wandb_records(path: Path) -> list[Any]:
    """Return the records of an ended run, once the service process has written all of them."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(DecodeError):  # the newest record may be incomplete
            records = [Record.FromString(data) for data in leveldb_records(path.read_bytes())]
            if any(one.WhichOneof("record_type") == "exit" for one in records):
                return records
        time.sleep(0.05)
    pytest.fail(f"{path} has no exit record")


def read_wandb(path: Path) -> Stored:
    """Read the file of an offline run, as ``wandb sync`` does."""
    stored = Stored()
    kinds = {"image-file": "figures", "html-file": "texts", "table-file": "tables"}
    for record in wandb_records(path):
        # Values are flat; the attributes of an image, a text or a table have nested keys.
        row = {
            tuple(item.nested_key) or (item.key,): json.loads(item.value_json)
            for item in record.history.item
        }
        step = row.pop(("step",), None)
        for (key, *nested), value in row.items():
            if nested == ["_type"]:
                assert key.startswith(kinds[value])
                stored.exhibits.setdefault(key.split("/")[-1], []).append(step)
            elif key == "note":
                stored.notes.append(value)
            elif not nested and not key.startswith("_"):
                number = float({"NaN": "nan", "Infinity": "inf"}.get(value, value))
                stored.values.setdefault(key, []).append((step, number))
        for item in record.summary.update:
            if item.key == "status":
                stored.status = json.loads(item.value_json)
    return stored


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in the log format of LevelDB, after W&B's header of 7 bytes.

    A record consists of fragments in blocks of 32 KiB. The header of a fragment is its checksum
    (4 bytes), its length (2 bytes) and its type: full (1), first (2), middle (3) or last (4).
    """
    position, record = 7, b""
    while position + 7 <= len(data):
        if 32_768 - position % 32_768 < 7:  # padding at the end of a block
            position += 32_768 - position % 32_768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@needs_module("wandb", "PIL")
class TestWandbOffline(LoggerContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[WandbPlace]:
        place = WandbPlace(tmp_path / "offline")
        yield place
        for logger in place.loggers:
            logger.close(None)


@needs_module("mlflow", "wandb", "PIL")
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_library_follows_a_job_in_the_process_of_its_logger(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read it
    mlflow, wandb = MlflowPlace((tmp_path / "mlruns").as_uri()), WandbPlace(tmp_path / "offline")
    place = {"mlflow": mlflow, "wandb": wandb}[name]
    job = Job(tmp_path / JOB_ID)
    job.steps(range(1, 4))
    job.exhibits(3)
    job.status("finished")
    warnings: list[str] = []

    thread = follow_elsewhere(name, place.make().options, job.path, warnings.append)
    thread.join(120)

    assert not thread.is_alive()
    assert warnings == []
    stored = place.read()
    assert stored.values["train/loss"] == losses(1, 3)
    assert stored.exhibits == {"curve": [3], "report": [3], "worst": [3]}
    assert stored.status == "finished"


@needs_module("wandb")
def test_run_of_wandb_that_failed_to_start_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb.teardown()  # it has read the environment for an earlier test
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
        job = Job(tmp_path / JOB_ID)
        job.steps([1])
        folder = tmp_path / "wandb"
        for _ in range(2):
            options = WandbOptions(project="digits", mode="online", folder=str(folder))
            with pytest.raises(LoggerError, match="wandb failed: ") as caught:
                export_log(job.path, WandbLogger(options))
            assert "in use" not in str(caught.value)
    place = WandbPlace(folder)

    export_log(job.path, place.make())

    assert place.read().values["train/loss"] == losses(1, 1)
