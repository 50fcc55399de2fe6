"""Specification of a submitted study, and the requests of kernels about it."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.plugins.search.schema import Parameter, SearchConfig, Value
from etrain_jupyter.plugins.search.template import TrialTemplate
from etrain_jupyter.storage.ownership import RECORD_FORMAT, sign
from etrain_jupyter.untrusted import check_job_id
from etrain_jupyter.wire.requests import Outcome, Request, Submitted

RECORD_FILE = "job.json"
BUNDLE_FILE = "bundle"


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """Specification of a study as submitted by a kernel."""

    study_id: str
    name: str
    folder: Path
    """The study's folder in the run store."""
    search: dict[str, Any]
    """JSON form of its ``SearchConfig``."""
    space: dict[str, dict[str, Any]]
    """JSON forms of its ``Parameter``s, by name."""
    num_trials: int
    template: dict[str, Any]
    """Fields of its ``TrialTemplate``."""
    job: dict[str, Any]
    """Fields of ``JobSpec`` that all trials share."""
    record: dict[str, Any]
    """Fields of ``job.json`` that all trials share."""
    created: float = 0.0
    """When it was first submitted, in seconds since the epoch."""

    @classmethod
    def from_message(cls, study: dict[str, Any]) -> StudySpec:
        """Build the specification from a kernel's message."""
        spec = cls(**{**study, "folder": Path(study["folder"])})
        check_job_id(spec.job_id_of(999))
        return spec

    def to_message(self) -> dict[str, Any]:
        """Return the plain form."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "folder": str(self.folder)}

    @cached_property
    def config(self) -> SearchConfig:
        """The validated search."""
        return SearchConfig.model_validate(self.search)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The validated space."""
        return {name: Parameter.model_validate(spec) for name, spec in self.space.items()}

    def job_id_of(self, number: int) -> str:
        """Return the job id of a trial. It is fixed, so that no trial becomes two jobs."""
        return f"{self.study_id}-{number:03d}"

    def build_config(self, values: dict[str, Value]) -> TrainConfig:
        """Return the configuration of a trial.

        Raises:
            ConfigError: If it is invalid.
        """
        template = TrialTemplate(**{**self.template, "names": tuple(self.template["names"])})
        return template.build(values)

    def make_job(self, number: int, config: TrainConfig, *, resumes: bool) -> JobSpec:
        """Return the job specification of a trial, and create its folder unless it exists."""
        job_id = self.job_id_of(number)
        name = f"{self.name}-{number:03d}"
        dump = config.model_copy(update={"name": name}).model_dump(mode="json")
        folder = self.folder.parent / job_id
        if not folder.exists():
            self._make_folder(folder, {"job_id": job_id, "name": name, "config": dump})
        return JobSpec(
            **self.job,
            job_id=job_id,
            name=name,
            run_dir=folder,
            config=dump,
            bundle_file=BUNDLE_FILE,
            min_workers=config.workers.min,
            max_workers=config.max_workers(),
            resumes=resumes,
        )

    def _make_folder(self, folder: Path, values: dict[str, Any]) -> None:
        # As in the kernel's run store: a reader never finds a partial job.
        written = {"format": RECORD_FORMAT, "created": time.time(), "bundle_file": BUNDLE_FILE}
        record = {**self.record, **values, **written}
        record["signature"] = sign(record)
        hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        hidden.mkdir(mode=0o700)
        try:
            _link_or_copy(self.folder / BUNDLE_FILE, hidden / BUNDLE_FILE)
            path = hidden / RECORD_FILE
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(record, file, indent=1)
            hidden.rename(folder)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise


@dataclass(frozen=True, kw_only=True)
class SubmitStudy(Request[Submitted], op="etrain_submit_study"):
    """Start a study, or resume one that has ended."""

    study: dict[str, Any]
    """The fields of ``StudySpec``."""


@dataclass(frozen=True, kw_only=True)
class StopStudy(Request[Outcome], op="etrain_stop_study"):
    """Stop a running study; its trials save checkpoints."""

    study_id: str


def _link_or_copy(source: Path, target: Path) -> None:
    # All trials share one file, so that a large bundle is stored once.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
