"""What the folder store does beyond the contract of all stores."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import CheckpointError, ConfigError
from etrain_jupyter.storage.checkpoints import (
    LocalStore,
    Manifest,
    choose_steps_to_keep,
    manifest_key,
    newest_valid,
    open_store,
)
from etrain_jupyter.storage.checkpoints.manifest import check_key, parse_manifest


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def save(store: LocalStore, step: int, data: bytes = b"weights") -> Manifest:
    part = store.put_part(store.begin(step), "model.safetensors", data)
    return Manifest(
        step=step,
        job_id="job",
        generation=1,
        config_digest="",
        created=1.5,
        parts={"model.safetensors": part},
    )


def test_layout_is_the_documented_one(store: LocalStore) -> None:
    store.commit(save(store, 1200))
    save(store, 1200)
    files = {p.relative_to(store.root).as_posix() for p in store.root.rglob("*") if p.is_file()}
    assert files == {
        "checkpoints/step_00001200/model.safetensors",
        "checkpoints/step_00001200.1/model.safetensors",
        "manifests/step_00001200.json",
    }
    assert manifest_key(1200) == "manifests/step_00001200.json"


@pytest.mark.parametrize("plant", ["link", "open"])
def test_folder_that_another_user_may_have_replaced_gets_no_checkpoint(
    tmp_path: Path, plant: str
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    store = LocalStore(tmp_path / "run")
    manifest = save(store, 100)
    (tmp_path / "run").rename(tmp_path / "moved")
    planted = tmp_path / "planted"
    (planted / "checkpoints" / "step_00000100").mkdir(parents=True)
    if plant == "link":
        (tmp_path / "run").symlink_to(planted)
    else:
        planted.chmod(0o777)
        planted.rename(tmp_path / "run")

    writes: list[Callable[[], object]] = [
        lambda: store.begin(200),
        lambda: store.put_part("checkpoints/step_00000100", "other", b"weights"),
        lambda: store.commit(manifest),
        lambda: store.prune([]),
    ]
    for write in writes:
        with pytest.raises(CheckpointError, match="was replaced, and another user may have"):
            write()

    found = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    assert found == ["checkpoints", "step_00000100"]
    # Once it is removed, checkpoints are written again, and only this user can read them.
    (tmp_path / "run").rename(tmp_path / "removed")
    assert store.commit(save(store, 200))
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_folder_that_the_user_opens_to_others_keeps_getting_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    store = LocalStore(tmp_path / "run")
    (tmp_path / "run").chmod(0o775)

    assert store.commit(save(store, 100))


def test_listing_does_not_create_the_folder(store: LocalStore) -> None:
    assert store.list_steps() == []
    assert not store.root.exists()


def test_unknown_files_are_never_changed(store: LocalStore) -> None:
    store.commit(save(store, 1))
    mine = store.root / "checkpoints" / "my_notes"
    mine.mkdir()
    (store.root / "manifests" / "readme.txt").write_text("mine")
    store.commit(save(store, 2))
    assert store.list_steps() == [1, 2]
    store.prune([2])
    assert mine.is_dir()
    assert (store.root / "manifests" / "readme.txt").exists()


def test_temporary_manifests_of_a_crash_are_removed(store: LocalStore) -> None:
    store.commit(save(store, 5))
    folder = store.root / "manifests"
    (folder / ".step_00000003.0a1b2c3d").write_text("{")
    (folder / ".step_00000007.0a1b2c3d").write_text("{")
    store.prune([5])
    assert sorted(os.listdir(folder)) == [".step_00000007.0a1b2c3d", "step_00000005.json"]


def test_link_out_of_the_store_is_refused(store: LocalStore, tmp_path: Path) -> None:
    manifest = save(store, 1)
    store.commit(manifest)
    part = manifest.parts["model.safetensors"]
    secret = tmp_path / "secret"
    secret.write_bytes(b"weights")
    (store.root / part.key).unlink()
    (store.root / part.key).symlink_to(secret)
    with pytest.raises(CheckpointError, match="points outside of"):
        store.get_part(part)


def test_full_disk_leaves_no_part_and_is_reported(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.begin(1)

    def fill(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(
        CheckpointError, match=r"step_00000001/model\.safetensors cannot be writ.*No space"
    ):
        store.put_part(folder, "model.safetensors", b"weights")
    assert os.listdir(store.root / folder) == []


def test_write_corrupted_by_the_disk_is_detected(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.begin(1)
    fsync = os.fsync

    def flip(file: int) -> None:
        fsync(file)
        os.pwrite(file, b"W", 0)

    monkeypatch.setattr(os, "fsync", flip)
    with pytest.raises(CheckpointError, match="was altered"):
        store.put_part(folder, "model.safetensors", b"weights")
    assert os.listdir(store.root / folder) == []


def test_file_system_without_links_still_commits_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert store.commit(save(store, 1))
    assert not store.commit(save(store, 1, b"others"))
    assert newest_valid(store)[0].step == 1
    assert os.listdir(store.root / "manifests") == ["step_00000001.json"]


def test_path_that_is_not_a_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"step_00000001 cannot be started in .*file"):
        store.begin(1)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        store.list_steps()


WRITER = """
    import sys
    from etrain_jupyter.storage.checkpoints import LocalStore, Manifest
    store, step = LocalStore(sys.argv[1]), int(sys.argv[2])
    while True:
        step += 1
        folder = store.begin(step)
        parts = {
            name: store.put_part(folder, name, bytes([step % 256]) * 300_000)
            for name in ("model.safetensors", "optimizer.safetensors", "state.json")
        }
        manifest = Manifest(
            step=step, job_id="job", generation=1, config_digest="", created=0.0, parts=parts
        )
        if store.commit(manifest):
            print(step, flush=True)
        store.prune(store.list_steps()[-3:])
"""


def test_killed_writer_never_loses_an_acknowledged_checkpoint(store: LocalStore) -> None:
    """Invariant I6 with SIGKILL at whatever moment comes; the sixth writer clears up after all."""
    acknowledged = 0
    for delay in (1, 2, 3, 5, 8, 13):
        acknowledged = run_writer_until(store, acknowledged, num_commits=delay)
        manifest, skipped = newest_valid(store, job_id="job")
        assert manifest.step >= acknowledged
        assert skipped == []
    store.prune(store.list_steps()[-1:])
    save(store, 10**6)
    store.commit(save(store, 10**6 + 1))
    store.prune([10**6 + 1])
    assert os.listdir(store.root / "checkpoints") == ["step_01000001"]
    assert os.listdir(store.root / "manifests") == ["step_01000001.json"]


def run_writer_until(store: LocalStore, step: int, *, num_commits: int) -> int:
    """Start a writer and kill it somewhere in its next checkpoint; return what it acknowledged."""
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(store.root), str(step)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    try:
        lines = [writer.stdout.readline() for _ in range(num_commits)]
    finally:
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.wait()
        writer.stdout.close()
    return max(int(line) for line in lines if line.strip())


def test_stores_are_opened_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    opened = [open_store(url) for url in (str(tmp_path), f"file://{tmp_path}/a%20b", "~/runs")]
    assert [store.root for store in opened if isinstance(store, LocalStore)] == [
        tmp_path,
        tmp_path / "a b",
        tmp_path / "runs",
    ]


def test_invalid_store_urls_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.to names no bucket"):
        open_store("s3:///run")
    with pytest.raises(ConfigError, match="no store for gs://") as caught:
        open_store("gs://bucket/run")
    assert caught.value.path == ("checkpoint", "to")


def test_manifest_of_another_step_or_format_is_refused(store: LocalStore) -> None:
    text = save(store, 7).to_json()
    assert parse_manifest(text, step=7).created == 1.5
    with pytest.raises(CheckpointError, match="step_00000008: its manifest is for step 7"):
        parse_manifest(text, step=8)
    with pytest.raises(CheckpointError, match="format 1"):
        parse_manifest(text.replace('"version": 2', '"version": 1'), step=7)
    with pytest.raises(CheckpointError, match="was modified"):
        parse_manifest(text.replace('"generation": 1', '"generation": 2'), step=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("created", "x"), ("created", None), ("generation", "1"), ("job_id", 1), ("parts", [])],
        *[("size", "7"), ("size", 1.5), ("size", -1), ("size", 10**400), ("sha256", 5)],
        *[("key", 5), ("key", "checkpoints/\ud800/model"), ("key", "checkpoints/a\n/model")],
        *[("blocks", 5), ("blocks", ["x"]), ("unknown", 1)],
    ],
)
def test_manifest_of_another_user_with_invalid_values_is_refused(
    store: LocalStore, name: str, value: Any
) -> None:
    body: dict[str, Any] = json.loads(save(store, 7).to_json())
    del body["digest"]
    part = body["parts"]["model.safetensors"]
    (part if name in ("size", "sha256", "key", "blocks") else body)[name] = value
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["digest"] = hashlib.sha256(text.encode()).hexdigest()

    with pytest.raises(CheckpointError, match=r"step_00000007: its manifest|is refused"):
        parse_manifest(json.dumps(body), step=7)


@pytest.mark.parametrize("place", ["a\0b", "\ud800", "~nobody-here/runs"])
def test_path_of_another_users_record_that_cannot_exist_is_an_error(place: str) -> None:
    store = open_store(place)
    if not place.startswith("~"):
        with pytest.raises(CheckpointError, match="cannot be listed"):
            store.list_steps()


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "checkpoints//a",
        "checkpoints/./a/b",
        "checkpoints/a/b/c",
        "a/b/c",
        "checkpoints/a\\b/c",
    ],
)
def test_keys_that_are_not_plain_are_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="refused"):
        check_key(key)


def test_newest_checkpoints_and_protected_ones_are_kept() -> None:
    assert choose_steps_to_keep([400, 100, 300, 200], keep=2, protected=[100, 999]) == {
        100,
        300,
        400,
    }
    assert choose_steps_to_keep([100, 200], keep=0) == {200}
    assert choose_steps_to_keep([], keep=3) == set()
