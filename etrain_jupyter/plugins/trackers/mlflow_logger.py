"""Write a job to MLflow: one run per job, with metrics, parameters, tags and artifacts.

MLflow cannot remove metrics. If a job returns to an older step, a new run is therefore written from
the log, and the previous one is deleted, which ``mlflow`` can undo until ``mlflow gc``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field

from etrain_jupyter.config.differences import flat_keys
from etrain_jupyter.config.fields import Section
from etrain_jupyter.errors import LoggerError
from etrain_jupyter.log.events import JobStatus
from etrain_jupyter.log.exhibits import Table
from etrain_jupyter.log.loggers.base import Exhibit, LoggerEntry, Note, Record, RunInfo, Values
from etrain_jupyter.plugins.trackers import as_logger_error

JOB_TAG = "etrain.job_id"
REVISION_TAG = "etrain.revision"
RECORDS_TAG = "etrain.records"
"""Tag with the number of records that are stored."""
NOTE_TAG = "etrain.note.{index:04}"
FILES_TAG = "etrain.files"
"""Tag that explains why a run has no figures, texts and tables."""
NO_FILES = (
    "not stored: the server names a folder of the client for them, which can be any folder. "
    "Start it with mlflow server --artifacts-destination FOLDER"
)
MAX_METRICS = 1_000
"""Maximum number of metrics per request."""
MAX_PARAMS = 100
"""Maximum number of parameters per request."""
MAX_PARAM_LENGTH = 500
CONNECT_TIMEOUT_S = 10.0
STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_OTHER_CHARACTERS = re.compile(r"[^/\w.\- ]")
"""Characters that MLflow does not accept in the name of a metric or a file."""
# By default, MLflow retries a request for minutes. The feed has its own retries. A folder of files
# is the destination only if the user has named one, which is the consent that MLflow asks for.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


class MlflowOptions(Section):
    """Options of ``log.to: {mlflow: ...}``."""

    uri: str = ""
    """Tracking server, database or folder; by default MLFLOW_TRACKING_URI, or the database
    mlflow.db in the notebook's folder."""
    experiment: str = ""
    """Experiment of the runs; by default MLFLOW_EXPERIMENT_NAME, or Default."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Additional tags of the runs."""


class MlflowLogger:
    """Logger for MLflow.

    Args:
        uri: Tracking URI: ``http://``, ``https://``, ``sqlite:///``, ``file://`` or another scheme
            that MLflow supports.
        experiment: Name of the experiment; created if it does not exist.
        tags: Additional tags of the runs.
    """

    def __init__(self, uri: str, experiment: str, tags: Mapping[str, str] | None = None) -> None:
        self._uri, self._experiment, self._tags = uri, experiment, dict(tags or {})
        self._client: Any = None
        self._run_id = ""
        self._num_stored = 0
        self._has_local_files = False
        """True if a server, not the user, chose the artifact folder on this machine."""
        # Steps of the newest stored metrics, by key. The process may have died after it had stored
        # metrics, but not yet the tag that counts them.
        self._torn: dict[str, set[int]] = {}

    @classmethod
    def from_entry(cls, entry: LoggerEntry) -> Self:
        """Create the logger, without a connection.

        Raises:
            ConfigError: If an option is invalid or MLflow is not installed.
        """
        entry.require("mlflow", extra="mlflow")
        options = entry.read_as(MlflowOptions)
        uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        if urlsplit(uri).password:
            raise entry.error(
                "log.to: the mlflow uri contains a password, which would be stored with the job",
                key="uri",
                hint="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the "
                "scheduler runs",
            )
        experiment = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        return cls(_absolute(uri), experiment, options.tags)

    @property
    def options(self) -> dict[str, Any]:
        """All options, as JSON."""
        return {"uri": self._uri, "experiment": self._experiment, "tags": self._tags}

    def open(self, run: RunInfo) -> int:
        """Find or create the run of the job's revision; delete those of earlier revisions."""
        with self._calling():
            _check_server(self._uri)
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self._uri)
            experiment_id = self._experiment_id()
            found = self._client.search_runs(
                [experiment_id], filter_string=f"tags.`{JOB_TAG}` = '{run.job_id}'"
            )
            current = None
            for one in found:
                if one.data.tags.get(REVISION_TAG) == str(run.revision):
                    current = one
                else:
                    self._client.delete_run(one.info.run_id)
            if current is None:
                self._num_stored, self._torn = 0, {}
                self._create(run, experiment_id)
            else:
                self._continue(current)
        return self._num_stored

    def write(self, records: Sequence[Record]) -> None:
        """Write metrics and files, and then the tags that count and describe them."""
        with self._calling():
            metrics = [one for record in records for one in self._metrics_of(record)]
            for part in _parts(metrics, MAX_METRICS):
                self._client.log_batch(self._run_id, metrics=part)
            tags = {}
            for record in records:
                if isinstance(record, Exhibit) and self._has_local_files:
                    tags[FILES_TAG] = NO_FILES
                elif isinstance(record, Exhibit):
                    self._write_file(record)
                elif isinstance(record, Note):
                    tags[NOTE_TAG.format(index=record.index)] = record.text
            self._num_stored = records[-1].number + 1
            self._torn = {}
            self._set_tags({**tags, RECORDS_TAG: str(self._num_stored)})

    def drop_after(self, step: int, time: float) -> bool:
        """Return False: MLflow cannot remove metrics."""
        return False

    def close(self, status: JobStatus | None) -> None:
        """Set the final status of the run."""
        if status is not None and self._run_id:
            with self._calling():
                self._client.set_terminated(self._run_id, status=STATUSES[status])

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            where = _artifacts_of(self._uri)
            return str(self._client.create_experiment(self._experiment, artifact_location=where))
        if found.lifecycle_stage == "deleted":
            raise LoggerError(
                f"The MLflow experiment {self._experiment!r} has been deleted. Nothing was "
                f"written. Restore it with `mlflow experiments restore --experiment-id "
                f"{found.experiment_id}`, or choose another one."
            )
        return str(found.experiment_id)

    def _create(self, run: RunInfo, experiment_id: str) -> None:
        from mlflow.entities import Param

        created = self._client.create_run(
            experiment_id,
            run_name=run.job_id,
            start_time=int(run.created * 1000),
            tags={**self._tags, JOB_TAG: run.job_id, REVISION_TAG: str(run.revision)},
        )
        self._use(created)
        params = [Param(key, value) for key, value in params_of(run.config).items()]
        for part in _parts(params, MAX_PARAMS):
            self._client.log_batch(self._run_id, params=part)

    def _use(self, run: Any) -> None:
        self._run_id = run.info.run_id
        is_server = urlsplit(self._uri).scheme in ("http", "https")
        self._has_local_files = is_server and urlsplit(run.info.artifact_uri).scheme in ("", "file")

    def _continue(self, run: Any) -> None:
        self._use(run)
        self._num_stored = int(run.data.tags.get(RECORDS_TAG, "0"))
        # The newest write may have been interrupted. Its records are written again, except metrics
        # that are already stored: MLflow would store them twice.
        self._torn = {
            key: {one.step for one in self._client.get_metric_history(self._run_id, key)[-1000:]}
            for key in run.data.metrics
        }
        if run.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")

    def _metrics_of(self, record: Record) -> Iterator[Any]:
        from mlflow.entities import Metric

        if not isinstance(record, Values):
            return
        for tag, value in record.values.items():
            key = metric_key(tag)
            if record.step not in self._torn.get(key, ()):
                yield Metric(key, float(value), int(record.time * 1000), record.step)

    def _write_file(self, record: Exhibit) -> None:
        content = record.load()
        if content is None:
            return
        name = f"{_OTHER_CHARACTERS.sub('_', record.name)}/step_{record.step:08}"
        with tempfile.TemporaryDirectory(prefix="etrain-mlflow-") as folder:
            match content:
                case bytes():
                    target, data = f"figures/{name}.png", content
                case str():
                    target, data = f"texts/{name}.txt", content.encode()
                case Table():
                    table = {"columns": content.columns, "data": content.rows}
                    target, data = f"tables/{name}.json", json.dumps(table).encode()
            path = Path(folder, Path(target).name)
            path.write_bytes(data)
            self._client.log_artifact(self._run_id, str(path), str(Path(target).parent))

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._run_id, tags=[RunTag(*one) for one in tags.items()])

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Set defaults of MLflow while it is called; the notebook may use MLflow, too."""
        added = {key: value for key, value in _ENVIRONMENT.items() if key not in os.environ}
        os.environ.update(added)
        try:
            with as_logger_error(f"MLflow at {self._uri}"):
                yield
        finally:
            for key in added:
                os.environ.pop(key, None)


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration as flat parameters, without unset keys.

    >>> params_of({"model": "Net()", "optimizer": {"name": "Adam", "lr": 0.1}, "seed": None})
    {'model': 'Net()', 'optimizer.name': 'Adam', 'optimizer.lr': '0.1'}
    """
    known = {key: value for key, value in flat_keys(config) if value is not None}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in known.items()}
    return {_OTHER_CHARACTERS.sub("_", k): text[:MAX_PARAM_LENGTH] for k, text in texts.items()}


def metric_key(tag: str) -> str:
    """Return a name that MLflow accepts.

    >>> metric_key("train/top-5 (%)")
    'train/top-5 ___'
    """
    return _OTHER_CHARACTERS.sub("_", tag)[:250]


def _absolute(uri: str) -> str:
    """Make a path absolute, because the scheduler may run in a folder other than the notebook's."""
    scheme, separator, path = uri.partition(":///")
    if separator and scheme.startswith("sqlite"):
        return f"{scheme}:///{Path(path).expanduser().absolute()}"
    if "://" in uri or uri == "databricks" or uri.startswith("file:"):
        return uri
    return Path(uri).expanduser().absolute().as_uri()


def _artifacts_of(uri: str) -> str | None:
    """Return the folder of artifacts for a local database; other stores have their own."""
    scheme, separator, path = uri.partition(":///")
    if separator and scheme.startswith("sqlite"):
        return (Path(path).parent / "mlartifacts").as_uri()
    return None


def _check_server(uri: str) -> None:
    """Connect to a server once, because MLflow would retry for minutes."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), CONNECT_TIMEOUT_S).close()
    except OSError as exc:
        raise LoggerError(
            f"The MLflow server at {uri} is not reachable: {exc.strerror or exc}."
        ) from exc


def _parts(items: Sequence[Any], size: int) -> Iterable[list[Any]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))
