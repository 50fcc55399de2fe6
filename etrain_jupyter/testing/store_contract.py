"""Contract suite for checkpoint stores: subclass ``StoreContract`` and provide a place.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def place(self, tmp_path):
            return MyPlace(tmp_path)

The place opens the store and can modify its data directly; see ``StorePlace``. Its store must
write a part of 12 MB in several blocks.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import (
    CheckpointStore,
    Manifest,
    Part,
    manifest_key,
    newest_valid,
    open_newest,
)

_MODEL = bytes(range(256)) * 64
_STATE = b'{"step": 0}'
_BIG = bytes(range(251)) * 50_000


class StorePlace(Protocol):
    """Direct access to a store's data, for injecting faults."""

    def open(self) -> CheckpointStore:
        """Return a new store object for the same place, as in another process."""
        ...

    def list_keys(self) -> set[str]:
        """Return the keys of all its files or objects."""
        ...

    def read(self, key: str) -> bytes:
        """Return the data at a key."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the data at a key."""
        ...

    def remove(self, key: str) -> None:
        """Delete the data at a key."""
        ...


class StoreContract:
    """The suite; a subclass provides the fixture ``place``."""

    @pytest.fixture
    def store(self, place: StorePlace) -> CheckpointStore:
        """Return the store under test."""
        return place.open()

    def test_new_store_has_no_checkpoint(self, store: CheckpointStore) -> None:
        """An empty store reports that it is empty, without an error."""
        assert store.list_steps() == []
        assert store.prune([]) == []
        with pytest.raises(CheckpointError, match="no checkpoint yet"):
            newest_valid(store)

    def test_saved_bytes_come_back(self, store: CheckpointStore, place: StorePlace) -> None:
        """A checkpoint committed by one process can be read by another one."""
        manifest = save(store, 100)
        assert store.commit(manifest)
        found = open_newest(place.open(), job_id="job")
        assert found.manifest == manifest
        assert found.skipped == []
        assert found.files["model.safetensors"].read_bytes() == _MODEL
        assert found.files["state.json"].read_bytes() == _STATE
        assert manifest.size_bytes == len(_MODEL) + len(_STATE)

    def test_files_and_empty_parts_can_be_stored(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        """A part may come from a local file, and may be empty."""
        source = tmp_path / "source"
        source.write_bytes(_MODEL)
        folder = store.begin(1)
        from_file = store.put_part(folder, "model.safetensors", source)
        empty = store.put_part(folder, "empty", b"")
        view = store.put_part(folder, "view", memoryview(_MODEL)[3:10])
        assert source.read_bytes() == _MODEL
        assert store.get_part(from_file).read_bytes() == _MODEL
        assert store.get_part(empty).read_bytes() == b""
        assert store.get_part(view).read_bytes() == _MODEL[3:10]

    def test_blocks_of_a_part_are_read_one_by_one(
        self, store: CheckpointStore, place: StorePlace
    ) -> None:
        """A reader of a range needs only its blocks, each with a digest in the manifest."""
        folder = store.begin(1)
        big = store.put_part(folder, "optimizer.safetensors", _BIG)
        small = store.put_part(folder, "state.json", _STATE)
        assert big.block_bytes >= 1
        reader = place.open()
        for part, data in ((big, _BIG), (small, _STATE)):
            blocks = [reader.read_block(part, number) for number in range(part.num_blocks)]
            assert b"".join(blocks) == data
            first, stop = part.block_range(part.num_blocks - 1)
            assert (len(blocks[-1]), stop) == (stop - first, len(data))
        assert Part.from_json(json.loads(json.dumps(vars(big)))) == big

    def test_damaged_block_is_refused_and_the_others_are_read(
        self, store: CheckpointStore, place: StorePlace
    ) -> None:
        """Each block is verified by itself."""
        part = store.put_part(store.begin(1), "optimizer.safetensors", _BIG)
        last = part.num_blocks - 1
        place.write(part.key, _BIG[:-1] + bytes([_BIG[-1] ^ 1]))
        reader = place.open()
        assert reader.read_block(part, 0) == _BIG[: part.block_bytes]
        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors was altered"):
            reader.read_block(part, last)
        place.write(part.key, _BIG[:-7])
        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors has \d+ bytes instead"):
            reader.read_block(part, last)
        place.remove(part.key)
        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
            reader.read_block(part, 0)

    def test_checkpoint_without_manifest_does_not_exist(self, store: CheckpointStore) -> None:
        """After an interrupted write, the previous checkpoint is still the newest."""
        store.commit(save(store, 100))
        save(store, 200)
        assert store.list_steps() == [100]
        assert newest_valid(store)[0].step == 100

    def test_keys_are_never_used_twice(self, store: CheckpointStore, place: StorePlace) -> None:
        """A second attempt at a step uses another folder, and each part is written only once."""
        # The writer of the first attempt may still be alive: an evicted rank that has not detected
        # its eviction yet.
        folder = store.begin(100)
        store.put_part(folder, "model.safetensors", b"first")
        other = place.open().begin(100)
        assert other != folder
        assert store.begin(100) not in {folder, other}
        part = place.open().put_part(other, "model.safetensors", b"second")
        with pytest.raises(CheckpointError, match="never used twice"):
            store.put_part(folder, "model.safetensors", b"third")
        assert store.get_part(part).read_bytes() == b"second"

    def test_one_of_many_writers_commits(self, place: StorePlace) -> None:
        """Of several writers of a step, only one succeeds, and readers get its bytes."""

        # Each writer has its own store object and its own data, as in another process.
        def write(writer: int) -> tuple[int, bool]:
            store = place.open()
            return writer, store.commit(save(store, 100, model=bytes([writer]) * 1000))

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(write, range(4)))
        winners = [writer for writer, is_mine in results if is_mine]
        assert len(winners) == 1
        model = open_newest(place.open()).files["model.safetensors"].read_bytes()
        assert model == bytes(winners * 1000)

    def test_commit_can_be_repeated(self, store: CheckpointStore, place: StorePlace) -> None:
        """A writer that does not know whether it committed can repeat the call."""
        mine, other = save(store, 100), save(place.open(), 100, model=b"other")
        assert store.commit(mine)
        assert store.commit(mine)
        assert not place.open().commit(other)

    def test_commit_needs_its_parts(self, store: CheckpointStore, place: StorePlace) -> None:
        """A manifest never refers to a missing part."""
        manifest = save(store, 100)
        place.remove(manifest.parts["state.json"].key)
        with pytest.raises(CheckpointError, match=r"state\.json is missing"):
            store.commit(manifest)
        assert store.list_steps() == []

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            ("missing", "is missing"),
            ("short", "bytes instead of"),
            ("bit", "was altered"),
            ("pickle", "was altered"),
        ],
    )
    def test_damaged_part_is_refused_and_the_older_one_loads(
        self, store: CheckpointStore, place: StorePlace, fault: str, reason: str
    ) -> None:
        """Readers fall back to the newest valid checkpoint, and report the skipped ones."""
        store.commit(save(store, 100))
        manifest = save(store, 200)
        store.commit(manifest)
        _damage(place, manifest.parts["model.safetensors"].key, fault)
        found, skipped = newest_valid(place.open())
        assert found.step == 100
        assert len(skipped) == 1
        assert skipped[0].startswith("step_00000200: ")
        assert "model.safetensors" in skipped[0]
        assert reason in skipped[0]

    @pytest.mark.parametrize("fault", ["short", "bit", "empty", "list"])
    def test_damaged_manifest_is_refused_and_the_older_one_loads(
        self, store: CheckpointStore, place: StorePlace, fault: str
    ) -> None:
        """A truncated or corrupt manifest is not a checkpoint."""
        store.commit(save(store, 100))
        store.commit(save(store, 200))
        _damage(place, manifest_key(200), fault)
        found, skipped = newest_valid(place.open())
        assert found.step == 100
        assert len(skipped) == 1
        assert "its manifest" in skipped[0]

    def test_checkpoint_of_another_job_is_refused(self, store: CheckpointStore) -> None:
        """A checkpoint of another job is not loaded by mistake."""
        store.commit(save(store, 100))
        store.commit(save(store, 200, job_id="stranger"))
        found, skipped = newest_valid(store, job_id="job")
        assert found.step == 100
        assert skipped == ["step_00000200: it belongs to job stranger, not to job"]

    def test_error_without_valid_checkpoint_lists_all_reasons(
        self, store: CheckpointStore, place: StorePlace
    ) -> None:
        """If no checkpoint is valid, the error gives the reason for each."""
        for step in (100, 200):
            manifest = save(store, step)
            store.commit(manifest)
            _damage(place, manifest.parts["state.json"].key, "missing")
        with pytest.raises(CheckpointError, match=r"step_00000200: .*step_00000100: "):
            newest_valid(store)

    @pytest.mark.parametrize(
        "key",
        ["../secret", "/etc/passwd", "checkpoints/../../secret", "manifests/x/y", "checkpoints/a"],
    )
    def test_keys_outside_of_the_store_are_refused(
        self, store: CheckpointStore, place: StorePlace, key: str
    ) -> None:
        """A manifest cannot make a reader open another file, regardless of who wrote it."""
        # The manifest is valid except for the key: `to_json` computes its digest, as an attacker
        # with access to the folder could.
        part = Part(key=key, sha256="0" * 64, size=1)
        with pytest.raises(CheckpointError, match="refused"):
            store.get_part(part)
        with pytest.raises(CheckpointError, match="refused"):
            store.read_block(part, 0)
        good = save(store, 100)
        evil = Manifest(**{**vars(good), "parts": {"model.safetensors": part}})
        place.write(manifest_key(100), evil.to_json().encode())
        with pytest.raises(CheckpointError, match="refused"):
            store.read_manifest(100)
        with pytest.raises(CheckpointError, match="refused"):
            store.put_part("checkpoints/..", "secret", b"x")

    def test_prune_keeps_the_given_steps(self, store: CheckpointStore, place: StorePlace) -> None:
        """Other checkpoints are deleted, manifest and parts; the kept ones remain valid."""
        for step in (100, 200, 300):
            store.commit(save(store, step))
        removed = place.open().prune([200, 300])
        assert set(removed) == {"manifests/step_00000100.json", "checkpoints/step_00000100"}
        assert store.list_steps() == [200, 300]
        assert not any("step_00000100" in key for key in place.list_keys())
        assert newest_valid(store)[1] == []

    def test_prune_deletes_leftovers_of_crashed_writers(
        self, store: CheckpointStore, place: StorePlace
    ) -> None:
        """Parts without a manifest are deleted once a newer checkpoint exists, but not before."""
        save(store, 100)  # older than the newest checkpoint: its writer has crashed
        save(store, 200)  # another attempt at the same step may still be running
        store.commit(save(store, 200))
        save(store, 300)  # newer: it may still be written
        removed = store.prune([200])
        assert removed == ["checkpoints/step_00000100"]
        store.commit(save(store, 300))
        assert set(store.prune([200, 300])) == {"checkpoints/step_00000200"}
        assert newest_valid(store) == (store.read_manifest(300), [])
        store.commit(save(store, 400))
        assert set(store.prune([200, 300, 400])) == {"checkpoints/step_00000300"}
        assert all(place.read(key) is not None for key in place.list_keys())

    def test_prune_keeps_the_parts_of_a_manifest_that_it_cannot_read(
        self, store: CheckpointStore, place: StorePlace
    ) -> None:
        """An unreadable checkpoint may be readable later: only an explicit prune deletes it."""
        manifest = save(store, 100)
        store.commit(manifest)
        whole = place.read(manifest_key(100))
        store.commit(save(store, 200))
        _damage(place, manifest_key(100), "short")
        assert store.prune([100, 200]) == []
        place.write(manifest_key(100), whole)
        assert store.read_manifest(100) == manifest
        assert store.get_part(manifest.parts["state.json"]).read_bytes() == _STATE


def save(
    store: CheckpointStore, step: int, *, model: bytes = _MODEL, job_id: str = "job"
) -> Manifest:
    """Store a small checkpoint's parts; return the manifest, which is not committed yet."""
    folder = store.begin(step)
    parts = {
        "model.safetensors": store.put_part(folder, "model.safetensors", model),
        "state.json": store.put_part(folder, "state.json", _STATE),
    }
    return Manifest(
        step=step,
        job_id=job_id,
        generation=1,
        config_digest="c" * 64,
        created=1_700_000_000.0,
        parts=parts,
    )


def _damage(place: StorePlace, key: str, fault: str) -> None:
    data = place.read(key)
    if fault == "missing":
        place.remove(key)
    elif fault == "short":
        place.write(key, data[:-7])
    elif fault == "bit":
        middle = len(data) // 2
        place.write(key, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif fault == "pickle":
        # A valid pickle of the right size, so only the digest shows that it is another file.
        place.write(key, b"\x80\x04N.".ljust(len(data), b"\0"))
    else:
        place.write(key, {"empty": b"", "list": b"[1, 2]"}[fault])
