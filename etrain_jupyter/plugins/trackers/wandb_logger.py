"""Write a job to Weights & Biases, online or into a folder for a later ``wandb sync``.

A row of a run's history cannot be removed. If a job returns to an older step, a new run is
therefore written from the log, with the suffix ``-2``, ``-3`` ... Offline, the folder of the
previous run is removed unless it has been synced; online, the previous run gets a tag.

Rows are numbered by ``Record.number``, so that W&B itself ignores a row it has already stored.
"""

from __future__ import annotations

import html
import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from etrain_jupyter.config.fields import Section
from etrain_jupyter.log.events import JobStatus
from etrain_jupyter.log.exhibits import Table
from etrain_jupyter.log.loggers.base import Exhibit, LoggerEntry, Note, Record, RunInfo, Values
from etrain_jupyter.plugins.trackers import as_logger_error
from etrain_jupyter.untrusted import plain_text

STEP = "step"
"""Column with the step, the horizontal axis of the charts."""
SUPERSEDED = "etrain-superseded"
"""Tag of a run that another revision has replaced."""
EXIT_CODES = {"finished": 0, "stopped": 0, "failed": 1}


class WandbOptions(Section):
    """Options of ``log.to: {wandb: ...}``."""

    project: str = ""
    """Project of the runs; by default WANDB_PROJECT, or etrain."""
    entity: str = ""
    """User or team that owns the project; by default WANDB_ENTITY, or the account's default."""
    mode: Literal["online", "offline"] | None = None
    """Upload while the job runs, or write a folder for wandb sync; by default WANDB_MODE, or
    online."""
    folder: str = ""
    """Folder for the files; by default WANDB_DIR, or the notebook's folder."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the runs."""


class WandbLogger:
    """Logger for Weights & Biases.

    Args:
        options: Its options, complete.
    """

    def __init__(self, options: WandbOptions) -> None:
        self._options = options
        self._run: Any = None
        self._num_stored = 0

    @classmethod
    def from_entry(cls, entry: LoggerEntry) -> Self:
        """Create the logger, without a connection.

        Raises:
            ConfigError: If an option is invalid or the package wandb is not installed.
        """
        entry.require("wandb", extra="wandb")
        if "api_key" in entry.values:
            raise entry.error(
                "log.to: the API key of wandb would be stored with the job",
                key="api_key",
                hint="remove it, and run `wandb login` or set WANDB_API_KEY where the scheduler "
                "runs",
            )
        options = entry.read_as(WandbOptions)
        folder = options.folder or os.environ.get("WANDB_DIR") or "."
        mode = options.mode or os.environ.get("WANDB_MODE") or "online"
        if mode not in ("online", "offline"):
            raise entry.error(
                f"log.to: WANDB_MODE is {mode!r}, so wandb would write nothing",
                hint="unset it, or write wandb: {mode: offline}",
            )
        return cls(
            options.model_copy(
                update={
                    "project": options.project or os.environ.get("WANDB_PROJECT") or "etrain",
                    "entity": options.entity or os.environ.get("WANDB_ENTITY") or "",
                    "mode": mode,
                    "folder": str(Path(folder).expanduser().absolute()),
                }
            )
        )

    @property
    def options(self) -> dict[str, Any]:
        """All options, as JSON."""
        return self._options.model_dump(mode="json")

    def open(self, run: RunInfo) -> int:
        """Start or continue the run of the job's revision."""
        self._finish(None)
        with as_logger_error("wandb"):
            import wandb

            run_id = run.job_id if not run.revision else f"{run.job_id}-{run.revision + 1}"
            is_offline = self._options.mode == "offline"
            Path(self._options.folder).mkdir(parents=True, exist_ok=True)
            if is_offline:
                _remove_unsynced(Path(self._options.folder), run)
            self._run = _init(
                project=self._options.project,
                entity=self._options.entity or None,
                mode="offline" if is_offline else "online",
                dir=self._options.folder,
                id=run_id,
                name=run.job_id,
                group=run.job_id,
                tags=self._options.tags or None,
                config={**run.config, "job_id": run.job_id, "revision": run.revision},
                # The notebook may have a run of its own.
                reinit="create_new",
                resume=None if is_offline else "allow",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_code=True,
                    disable_git=True,
                    x_disable_machine_info=True,
                    x_disable_stats=True,
                ),
            )
            self._run.define_metric(STEP, hidden=True)
            self._run.define_metric("*", step_metric=STEP)
            # An offline run begins with an empty folder. An online run that exists continues.
            self._num_stored = self._run.step if self._run.resumed else 0
        return self._num_stored

    def write(self, records: Sequence[Record]) -> None:
        """Write one row per record."""
        with as_logger_error("wandb"):
            for record in records:
                values = self._values_of(record)
                # The row is written even if it has no value, because numbers must not shift.
                row = {STEP: record.step, "_timestamp": record.time, **values}
                self._run.log(row, step=record.number, commit=True)

    def drop_after(self, step: int, time: float) -> bool:
        """Return False: W&B cannot remove rows."""
        with as_logger_error("wandb"):
            self._run.tags = (*(self._run.tags or ()), SUPERSEDED)
        return False

    def close(self, status: JobStatus | None) -> None:
        """Finish the run, with exit code 1 if the job has failed."""
        self._finish(status)

    def _finish(self, status: JobStatus | None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        with as_logger_error("wandb"):
            if status is not None:
                run.summary["status"] = status
            run.finish(exit_code=EXIT_CODES.get(status or "", 0))

    def _values_of(self, record: Record) -> dict[str, Any]:
        match record:
            case Values():
                return dict(record.values)
            case Note():
                return {"note": record.text}
            case Exhibit():
                return self._media_of(record)
        return {}

    def _media_of(self, record: Exhibit) -> dict[str, Any]:
        import wandb

        match record.load():
            case None:
                return {}
            case bytes(content):
                from PIL import Image  # wandb requires pillow for images

                with Image.open(io.BytesIO(content)) as picture:
                    return {f"figures/{record.name}": wandb.Image(picture)}
            case str(content):
                text = f"<pre>{html.escape(plain_text(content))}</pre>"
                return {f"texts/{record.name}": wandb.Html(text, inject=False)}
            case Table(columns, rows):
                table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
                return {f"tables/{record.name}": table}


def _remove_unsynced(folder: Path, run: RunInfo) -> None:
    """Remove the job's earlier runs from the folder, unless they have been synced.

    An offline run cannot be continued in its folder, so it is written again.
    """
    ids = [run.job_id, *(f"{run.job_id}-{n}" for n in range(2, run.revision + 2))]
    for run_id in ids:
        for old in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
            # The pattern also matches the folder of a job whose id ends with this one.
            is_its = (old / f"run-{run_id}.wandb").exists()
            if is_its and not (old / f"run-{run_id}.wandb.synced").exists():
                shutil.rmtree(old, ignore_errors=True)


def _init(**options: Any) -> Any:
    """Start a run; after a failure, make its id available again."""
    import wandb

    try:
        return wandb.init(**options)
    except Exception:
        # W&B's service process would reject the id of a run that failed to start. It also serves
        # the notebook's own run, which must continue.
        if wandb.run is None:
            wandb.teardown()
        raise
