"""Cache of blocks on disk: one fetch for many readers, a bounded size, and disks that fail."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etrain_jupyter.data.disk_cache import DiskCache


class Source:
    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.is_slow = threading.Event()

    def get(self, cache: DiskCache, key: str, size: int = 100) -> bytes:
        def fetch() -> bytes:
            self.fetched.append(key)
            self.is_slow.wait(0.05)
            return key.encode().ljust(size, b".")

        return cache.get(key, size, fetch)


@pytest.fixture
def source() -> Source:
    return Source()


def make_cache(folder: Path, max_bytes: int = 100_000) -> tuple[DiskCache, list[str]]:
    warnings: list[str] = []
    return DiskCache(folder / "cache", max_bytes, warnings.append), warnings


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("*.block"))


def test_another_cache_of_the_same_folder_finds_the_bytes(tmp_path: Path, source: Source) -> None:
    one, two = make_cache(tmp_path)[0], make_cache(tmp_path)[0]

    assert source.get(one, "a") == source.get(two, "a") == b"a".ljust(100, b".")
    assert source.fetched == ["a"]


def test_readers_at_the_same_time_fetch_once(tmp_path: Path, source: Source) -> None:
    caches = [make_cache(tmp_path)[0] for _ in range(8)]

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda cache: source.get(cache, "a"), caches))

    assert len(found) == 1
    assert source.fetched == ["a"]


def test_least_recently_used_blocks_are_removed(tmp_path: Path, source: Source) -> None:
    cache, _ = make_cache(tmp_path, max_bytes=10 * 132)
    for number in range(30):
        source.get(cache, f"{number}")
        source.get(cache, "0")  # stays in use

    assert sum(path.stat().st_size for path in entries(tmp_path)) <= 10 * 132
    assert source.fetched.count("0") == 1


def test_corrupted_block_is_fetched_again(tmp_path: Path, source: Source) -> None:
    cache, _ = make_cache(tmp_path)
    source.get(cache, "a")
    [path] = entries(tmp_path)
    path.write_bytes(b"b" + path.read_bytes()[1:])

    assert source.get(cache, "a").startswith(b"a")
    assert source.fetched == ["a", "a"]


def test_full_disk_is_bypassed_with_one_warning(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, warnings = make_cache(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)

    assert [source.get(cache, key)[:1] for key in "abca"] == [b"a", b"b", b"c", b"a"]
    assert source.fetched == ["a", "b", "c", "a"]
    assert len(warnings) == 1
    assert "is full" in warnings[0]
    assert list((tmp_path / "cache").glob("*.partial")) == []


@pytest.mark.parametrize("is_link", [False, True])
def test_folder_that_others_may_have_prepared_is_not_used(
    tmp_path: Path, source: Source, is_link: bool
) -> None:
    if is_link:
        (tmp_path / "private").mkdir(mode=0o700)
        (tmp_path / "cache").symlink_to(tmp_path / "private")
    else:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)

    cache, warnings = make_cache(tmp_path)

    assert source.get(cache, "a").startswith(b"a")
    assert entries(tmp_path) == []
    assert "another user" in warnings[0]


@pytest.mark.parametrize("max_bytes", [0, 50])
def test_block_larger_than_the_cache_is_not_stored(
    tmp_path: Path, source: Source, max_bytes: int
) -> None:
    cache, warnings = make_cache(tmp_path, max_bytes=max_bytes)

    assert source.get(cache, "a").startswith(b"a")
    assert entries(tmp_path) == []
    assert warnings == []
