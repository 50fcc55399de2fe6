"""The studies of one scheduler, and their records for its successor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from etrain_jupyter.errors import EtrainError, FencedError
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.coordinator.services import Handler, ServiceHost
from etrain_jupyter.log import events
from etrain_jupyter.plugins.search.driver import StudyDriver
from etrain_jupyter.plugins.search.folder import StudyLease, import_optuna
from etrain_jupyter.plugins.search.rules import share_studies
from etrain_jupyter.plugins.search.spec import StopStudy, StudySpec, SubmitStudy
from etrain_jupyter.rules.sizing.allocation import Claim
from etrain_jupyter.wire.requests import Outcome, Request, Submitted

logger = logging.getLogger("etrain.coordinator")

FOLDER = "studies"
CLOSE_S = 2.0
"""Timeout in seconds for storing the status of stopped studies when the cluster shuts down."""


class Studies:
    """Run studies next to the jobs.

    Args:
        host: Runs the trials.
    """

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._folder: Path | None = None  # for records, if a later scheduler would read them
        self._drivers: dict[str, StudyDriver] = {}
        self._replayed: list[StudySpec] = []

    @property
    def is_active(self) -> bool:
        """True while a study runs."""
        return bool(self._drivers or self._replayed)

    def handlers(self) -> dict[type[Request[Any]], Handler]:
        """Return the handlers of the requests about studies."""
        return {SubmitStudy: self._take_submission, StopStudy: self._take_stop}

    async def _take_submission(self, request: SubmitStudy) -> Submitted:
        await self._host.check_submission(Path(request.study["folder"]))
        spec = StudySpec.from_message(request.study)
        self.submit(spec)
        return Submitted(job_id=spec.study_id)

    async def _take_stop(self, request: StopStudy) -> Outcome:
        return Outcome(message=self.stop(request.study_id))

    def replay(self, folder: Path) -> None:
        """Keep records in a folder, and read those of the previous scheduler.

        ``start`` continues its studies.
        """
        self._folder = folder / FOLDER
        for path in sorted(self._folder.glob("*")):
            if path.name.startswith("."):
                continue
            try:
                self._replayed.append(StudySpec.from_message(msgpack.unpackb(path.read_bytes())))
            except (OSError, ValueError, TypeError, KeyError) as exc:
                logger.error("the record of study %s cannot be read: %s", path.name, exc)

    def start(self) -> None:
        """Continue the replayed studies, on the running event loop."""
        replayed, self._replayed = self._replayed, []
        for spec in replayed:
            try:
                self._drive(spec, StudyLease(spec.folder))
            except (FencedError, OSError) as exc:
                # Another cluster has resumed the study in the meantime.
                logger.error("study %s is not continued here: %s", spec.study_id, exc)
                self._remove_record(spec.study_id)

    def submit(self, spec: StudySpec) -> None:
        """Start or resume a study.

        Raises:
            RequestError: If it cannot run here; nothing was started.
        """
        if spec.study_id in self._drivers:
            raise RequestError(
                f"study {spec.study_id} is already running on this cluster. Nothing was submitted. "
                f"Follow it with %etrain study {spec.study_id}"
            )
        if not spec.folder.is_dir():
            raise RequestError(
                f"the scheduler cannot read the folder {spec.folder}. Nothing was submitted. Set "
                "ETRAIN_RUNS to a folder of this machine and restart the kernel"
            )
        try:
            import_optuna()
            lease = StudyLease(spec.folder)
        except EtrainError as exc:
            raise RequestError(str(exc)) from exc
        except OSError as exc:
            raise RequestError(
                f"the scheduler cannot write the folder {spec.folder} ({exc.strerror}). Nothing "
                "was submitted. Free space there, or set ETRAIN_RUNS to another folder and restart "
                "the kernel"
            ) from exc
        try:
            self._record(spec)
        except BaseException:
            lease.release()
            raise
        self._drive(spec, lease)

    def stop(self, study_id: str) -> str:
        """Stop a study; return the effect as a sentence.

        Raises:
            RequestError: If it does not run here.
        """
        driver = self._drivers.get(study_id)
        if driver is None:
            raise RequestError(f"study {study_id} is not running on this cluster")
        driver.stop("stopped by the user")
        return "stops: its trials save checkpoints at the next step boundary"

    def stop_all(self, reason: str) -> None:
        """Stop all studies before their jobs are stopped."""
        for driver in self._drivers.values():
            driver.stop(reason)

    async def close(self) -> None:
        """Wait until stopped studies have stored their status."""
        tasks = [driver.task for driver in self._drivers.values() if driver.verdict is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def take_events(self, job_id: str, new: Sequence[events.Event]) -> None:
        """Pass new events of a job to its study."""
        for driver in self._drivers.values():
            driver.take_events(job_id, new)

    def limit_claims(self, claims: Sequence[Claim], workers: Sequence[str]) -> Sequence[Claim]:
        """Let each study share its workers among its trials by its own rule."""
        return share_studies(claims, workers, [one.share for one in self._drivers.values()])

    def _drive(self, spec: StudySpec, lease: StudyLease) -> None:
        def forget(driver: StudyDriver) -> None:
            del self._drivers[spec.study_id]
            self._remove_record(spec.study_id)
            lease.release()
            self._host.after_change()

        self._drivers[spec.study_id] = StudyDriver(
            spec, self._host, on_end=forget, on_trouble=lease.show
        )

    def _remove_record(self, study_id: str) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / study_id).unlink()

    def _record(self, spec: StudySpec) -> None:
        if self._folder is None:  # an existing Dask scheduler, which nothing restarts
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._folder / f".{spec.study_id}"
        packed = msgpack.packb(spec.to_message())
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(packed)
        os.replace(draft, self._folder / spec.study_id)
