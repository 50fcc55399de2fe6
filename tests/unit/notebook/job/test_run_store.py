from __future__ import annotations

import json
from pathlib import Path

import pytest

from etrain_jupyter.errors import JobNotFoundError
from etrain_jupyter.notebook.job.job_record import RunRecord, safe_name
from etrain_jupyter.notebook.job.run_store import RunStore, default_root, new_job_id


def create(store: RunStore, name: str, *, created: float = 1.0, job_id: str = "") -> RunRecord:
    return store.create({"name": name, "created": created}, bundle=b"objects", job_id=job_id)


def test_created_job_is_read_back_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path)

    made = store.create(
        {"name": "digits", "created": 5.0, "config": {"epochs": 3}, "cell": "model: Net\n"},
        bundle=b"objects",
        job_id="digits-00c0ffee",
    )

    assert store.find("digits-00c0ffee") == made
    assert made.folder == tmp_path / "digits-00c0ffee"
    assert (made.folder / "bundle").read_bytes() == b"objects"
    assert json.loads((made.folder / "job.json").read_text())["config"] == {"epochs": 3}
    assert made.log_path == made.folder / "events.jsonl"


def test_interrupted_creation_leaves_nothing(tmp_path: Path) -> None:
    store = RunStore(tmp_path)

    with pytest.raises(TypeError):
        store.create({"name": "digits", "created": 1.0, "config": {"bad": object()}})

    assert list(tmp_path.iterdir()) == []
    assert store.records() == []


def test_existing_id_is_refused(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    create(store, "digits", job_id="digits-1")

    with pytest.raises(FileExistsError, match="digits-1"):
        create(store, "digits", job_id="digits-1")

    assert [path.name for path in tmp_path.iterdir()] == ["digits-1"]


def test_newest_job_comes_first_and_is_found_by_a_shared_name(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    create(store, "digits", created=1.0, job_id="digits-aa")
    create(store, "digits", created=3.0, job_id="digits-bb")
    create(store, "mnist", created=2.0, job_id="mnist-cc")

    assert [job.job_id for job in store.records()] == ["digits-bb", "mnist-cc", "digits-aa"]
    assert store.find("digits").job_id == "digits-bb"
    assert store.latest().job_id == "digits-bb"


def test_unique_prefix_of_an_id_is_enough(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    create(store, "digits", job_id="digits-aa11")
    create(store, "digits", job_id="digits-bb22")

    assert store.find("digits-a").job_id == "digits-aa11"
    with pytest.raises(JobNotFoundError, match=r"2 jobs begin with 'digits-': .*Type more"):
        store.find("digits-")


def test_error_for_an_unknown_job_suggests_the_nearest(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    create(store, "digits", job_id="digits-aa11")

    with pytest.raises(JobNotFoundError, match=r"no job 'digist' .*Did you mean digits"):
        store.find("digist")


def test_error_for_an_empty_store_contains_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(JobNotFoundError, match="%%etrain distributed"):
        RunStore(tmp_path / "none").latest()


def test_folders_that_are_not_jobs_are_skipped(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    create(store, "digits", job_id="digits-1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "job.json").write_text('{"job_id": "bro')

    assert [job.job_id for job in store.records()] == ["digits-1"]


def test_record_of_a_newer_version_is_read(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    made = create(store, "digits", job_id="digits-1")
    path = made.folder / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "blue"}))

    assert store.find("digits-1") == made


@pytest.mark.parametrize(
    ("format", "version", "remedy"),
    [(None, "0.1.0", "use etrain-jupyter 0.1"), (3, "0.3.0", "Upgrade etrain-jupyter")],
)
def test_run_in_another_format_is_refused_with_its_version_and_is_not_changed(
    tmp_path: Path, format: int | None, version: str, remedy: str
) -> None:
    store = RunStore(tmp_path)
    path = create(store, "digits", job_id="digits-1").folder / "job.json"
    values = json.loads(path.read_text()) | {"format": format, "version": version}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    before = path.read_bytes()

    for name in ("digits-1", "digits"):
        with pytest.raises(JobNotFoundError, match=f"from etrain-jupyter {version}, .*{remedy}"):
            store.find(name)

    assert remedy in store.scan().problems["digits-1"]
    assert path.read_bytes() == before


def test_job_with_a_log_is_never_discarded(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    taken, refused = create(store, "a", job_id="a-1"), create(store, "b", job_id="b-1")
    taken.log_path.write_text("{}\n")

    store.discard(taken)
    store.discard(refused)

    assert [job.job_id for job in store.records()] == ["a-1"]


def test_root_comes_from_the_environment_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert default_root({}) == tmp_path / "etrain-runs"
    assert default_root({"ETRAIN_RUNS": "/data/runs"}) == Path("/data/runs")


@pytest.mark.parametrize(
    ("text", "name"),
    [("my digits/run", "my-digits-run"), ("../../etc", "etc"), ("…", "job"), ("x" * 99, "x" * 40)],
)
def test_names_become_safe_file_names(text: str, name: str) -> None:
    assert safe_name(text) == name


def test_ids_differ() -> None:
    assert new_job_id("digits") != new_job_id("digits")
    assert new_job_id("digits").startswith("digits-")
