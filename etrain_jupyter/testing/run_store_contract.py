"""Contract suite for run stores: subclass ``RunStoreContract`` and provide a place.

::

    class TestMyRunStore(RunStoreContract):
        @pytest.fixture
        def place(self, tmp_path):
            return MyPlace(tmp_path)

The place opens the store as different machines would, and accesses its data directly; see
``RunPlace``.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import pytest

from etrain_jupyter.errors import EtrainError, JobNotFoundError
from etrain_jupyter.log.events import Event, JobPlanned, JobStatusChanged, JobSubmitted
from etrain_jupyter.notebook.job.job_record import RECORD_FILE, RunRecord
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob

BUNDLE = b"\x00objects\xff" * 100
_COMMON: dict[str, Any] = {"job_id": "digits-1", "time": 1.0}
_PLAN: dict[str, Any] = {
    **{"num_train_samples": 8, "num_eval_samples": 0, "global_batch_size": 4},
    **{"steps_per_epoch": 2, "total_steps": 6, "total_samples": 24},
    **{"num_parameters": 10, "num_trained_parameters": 10},
}


class RunPlace(Protocol):
    """Direct access to the data of a run store."""

    def open(self, machine: str = "here") -> RunStore:
        """Return a new store object for the same place, as in a process on another machine."""
        ...

    def list_keys(self) -> set[str]:
        """Return the keys of all its files or objects."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the data at a key."""
        ...

    def take(self, record: RunRecord, end: int) -> None:
        """Become the only writer of a job's log.

        Args:
            record: The job.
            end: Number of the last event when the caller found the log without a writer.

        Raises:
            EtrainError: If another process is the writer.
        """
        ...

    def log(self, record: RunRecord, events: Sequence[Event]) -> None:
        """Append to a job's log, as its coordinator would."""
        ...


class RunStoreContract:
    """The suite; a subclass provides the fixture ``place``."""

    @pytest.fixture
    def store(self, place: RunPlace) -> RunStore:
        """Return the store under test."""
        return place.open()

    def test_new_store_has_no_job(self, store: RunStore) -> None:
        """An empty store reports that it is empty, without an error."""
        assert store.records() == []
        with pytest.raises(JobNotFoundError, match=r"there is no job in .*Run a %%etrain"):
            store.latest()
        with pytest.raises(JobNotFoundError, match=r"no job 'digits' in .* \(0 jobs there\)"):
            store.find("digits")

    def test_writable_store_passes_the_check(self, store: RunStore) -> None:
        """The check before each submit can be repeated, and creates no job."""
        store.check_writable()
        store.check_writable()
        assert store.records() == []

    def test_job_is_visible_on_another_machine(self, store: RunStore, place: RunPlace) -> None:
        """A job created by one process is found by another one, with all its data."""
        made = create(store)
        found = place.open("there").find("digits-1")
        assert found.to_dict() == made.to_dict()
        assert found.config == {"epochs": 3}
        assert place.open("there").fetch_bundle(found).read_bytes() == BUNDLE

    def test_newest_job_comes_first_and_names_find_the_newest(self, store: RunStore) -> None:
        """A name refers to the newest of several jobs with that name."""
        for number in (1, 3, 2):
            create(store, f"digits-{number}", created=float(number))
        assert [job.job_id for job in store.records()] == ["digits-3", "digits-2", "digits-1"]
        assert store.latest().job_id == store.find("digits").job_id == "digits-3"
        with pytest.raises(JobNotFoundError, match="3 jobs begin with 'digi'"):
            store.find("digi")

    def test_job_id_is_used_only_once(self, store: RunStore, place: RunPlace) -> None:
        """The second job is refused, and the first one is unchanged."""
        create(store)
        with pytest.raises(FileExistsError, match="job digits-1 already exists"):
            create(place.open("there"), created=7.0)
        assert store.find("digits-1").created == 1.0

    def test_new_bundle_is_written_next_to_the_old_one(
        self, store: RunStore, place: RunPlace
    ) -> None:
        """A refused resume can be undone; an accepted one deletes the old bundle."""
        made = create(store)
        later = replace(made, bundle_digest=hashlib.sha256(b"new").hexdigest(), pool="other")
        written = store.rewrite(later, bundle=b"new")
        elsewhere = place.open("there")
        assert elsewhere.find("digits-1").to_dict() == written.to_dict()
        assert elsewhere.fetch_bundle(elsewhere.find("digits-1")).read_bytes() == b"new"
        assert elsewhere.fetch_bundle(made).read_bytes() == BUNDLE
        store.remove_bundle(made)
        assert "digits-1/bundle" not in place.list_keys()
        assert f"digits-1/{written.bundle_file}" in place.list_keys()

    def test_job_that_no_cluster_accepted_is_removed(
        self, store: RunStore, place: RunPlace
    ) -> None:
        """All of the job's data is deleted, unless the job has a log."""
        # A log proves that a cluster has accepted the job, even if its response was lost.
        made, taken = create(store), create(store, "digits-2")
        place.log(taken, [JobSubmitted(**_COMMON, name="digits", min_workers=1, max_workers=2)])
        store.discard(made)
        store.discard(taken)
        assert [job.job_id for job in place.open("there").records()] == ["digits-2"]
        assert not [key for key in place.list_keys() if key.startswith("digits-1/")]

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"name": 1}', b"\xff\xfe"])
    def test_entries_that_are_not_jobs_are_skipped(
        self, store: RunStore, place: RunPlace, data: bytes
    ) -> None:
        """Truncated records and other files do not hide valid jobs."""
        made = create(store)
        place.write(f"digits-2/{RECORD_FILE}", data)
        place.write("notes/readme", b"something else")
        place.write("stray", b"something else")
        assert [job.job_id for job in store.records()] == ["digits-1"]
        assert place.open("there").read("digits-1") == replace(
            made, folder=place.open("there").root / "digits-1"
        )
        for name in ("digits-2", "digits-3", "notes", "..", "digits-1/.."):
            assert store.read(name) is None

    def test_log_is_the_same_on_another_machine(self, store: RunStore, place: RunPlace) -> None:
        """History, status and list agree with the log on every machine."""
        made = create(store)
        events = story()
        place.log(made, events)
        there = place.open("there")
        job = TrainingJob(there.find("digits-1"), None)
        assert [event.kind for event in job.events()] == [event.kind for event in events]
        assert [event.seq for event in job.events()] == [1, 2, 3]
        assert job.status == "finished"
        summary = there.summarize(there.find("digits-1"))
        assert (summary.status, summary.total_steps, summary.is_gone) == ("finished", 6, False)
        # The other machine may keep a copy of the log, which must also get later events.
        place.log(made, [JobStatusChanged(**_COMMON, status="running")])
        again = TrainingJob(place.open("there").find("digits-1"), None)
        assert len(again.events()) == 4

    def test_log_has_one_writer(self, store: RunStore, place: RunPlace) -> None:
        """Of several processes that claim a job's log at the same time, only one succeeds."""
        # All of them claim the log after event 3, the last one; the first claim appends another.
        made = create(store)
        place.log(made, story())
        outcomes: list[str] = []

        def take() -> None:
            try:
                place.take(made, 3)
            except EtrainError as exc:
                outcomes.append(str(exc))
            else:
                outcomes.append("succeeded")

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == len(threads), outcomes
        assert outcomes.count("succeeded") == 1, outcomes


def create(store: RunStore, job_id: str = "digits-1", *, created: float = 1.0) -> RunRecord:
    """Create a job with fixed data."""
    values = {
        "name": "digits",
        "created": created,
        "config": {"epochs": 3},
        "cluster": {"cluster_id": "local-1", "address": "", "state_dir": "/nowhere"},
        "bundle_digest": hashlib.sha256(BUNDLE).hexdigest(),
    }
    return store.create(values, bundle=BUNDLE, job_id=job_id)


def story() -> list[Event]:
    """Return a short log."""
    return [
        JobSubmitted(**_COMMON, name="digits", min_workers=1, max_workers=2),
        JobPlanned(**_COMMON, **_PLAN),
        JobStatusChanged(**_COMMON, status="finished"),
    ]
