"""One file of a bundle on each machine, whoever uses it (review R6)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.wire.messages import BundleRef
from etrain_jupyter.wire.requests import BundlePiece, FetchBundle
from etrain_jupyter.worker.bundles import BundleFetchError, MachineBundles, folder_of

BUNDLE = bytes(range(256)) * 40
DIGEST = hashlib.sha256(BUNDLE).hexdigest()
ORDERED = BundleRef(digest=DIGEST, size=len(BUNDLE), path="/not/here/bundle")


class Head:
    """A scheduler that sends a bundle in pieces, and counts them."""

    def __init__(self, data: bytes = BUNDLE) -> None:
        self.data = data
        self.offsets: list[int] = []
        self.may_send = asyncio.Event()
        self.may_send.set()

    async def fetch(self, piece: FetchBundle) -> BundlePiece:
        assert piece.digest == DIGEST
        self.offsets.append(piece.offset)
        await self.may_send.wait()
        return BundlePiece(data=self.data[piece.offset : piece.offset + 1000])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(str(tmp_path / "dask" / "worker-1"))


def supervisor(folder: Path, head: Head) -> MachineBundles:
    made = MachineBundles(head.fetch)
    made.begin(folder)
    return made


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_supervisors_of_a_machine_fetch_one_file_and_the_last_one_removes_it(
    folder: Path,
) -> None:
    head = Head()
    head.may_send.clear()
    several = [supervisor(folder, head) for _ in range(4)]
    getting = [asyncio.create_task(one.get(ORDERED)) for one in several]
    getting.append(asyncio.create_task(several[0].get(ORDERED)))  # two trainers of one worker
    await asyncio.sleep(0.1)
    head.may_send.set()
    [path] = set(await asyncio.gather(*getting))

    assert path.read_bytes() == BUNDLE
    assert head.offsets == list(range(0, len(BUNDLE), 1000))
    assert (mode_of(folder), mode_of(path)) == (0o700, 0o600)
    for one in several[:-1]:
        one.release(DIGEST)
        one.release(DIGEST)
        assert path.exists()
    several[-1].release_all()
    assert list(folder.iterdir()) == []

    await several[0].get(ORDERED)  # another job of the same objects
    assert path.exists()
    several[0].release_all()
    assert list(folder.iterdir()) == []


async def test_file_in_a_shared_job_folder_is_read_in_place(folder: Path, tmp_path: Path) -> None:
    head = Head()
    shared = tmp_path / "bundle"
    shared.write_bytes(BUNDLE)
    one = supervisor(folder, head)
    assert await one.get(replace(ORDERED, path=str(shared))) == shared
    one.release(DIGEST)
    assert shared.exists()
    assert head.offsets == []
    assert not folder.exists()


@pytest.mark.parametrize("data", [BUNDLE[:-1], BUNDLE[:-1] + b"x", b""])
async def test_bytes_that_do_not_match_the_digest_are_refused(folder: Path, data: bytes) -> None:
    one = supervisor(folder, Head(data))
    with pytest.raises(
        BundleFetchError, match=f"does not match its digest: received {len(data)} of"
    ):
        await one.get(ORDERED)
    assert list(folder.iterdir()) == []
    again = supervisor(folder, Head())
    assert (await again.get(ORDERED)).read_bytes() == BUNDLE
    again.release_all()
    assert list(folder.iterdir()) == []


async def test_failed_fetch_does_not_block_the_next_supervisor(folder: Path) -> None:
    class Broken(Head):
        async def fetch(self, piece: FetchBundle) -> BundlePiece:
            await asyncio.sleep(0.1)
            raise BundleFetchError("gone")

    first, second = supervisor(folder, Broken()), supervisor(folder, Head())
    results: list[Any] = await asyncio.gather(
        first.get(ORDERED), second.get(ORDERED), return_exceptions=True
    )
    assert isinstance(results[0], BundleFetchError)
    assert results[1].read_bytes() == BUNDLE
    second.release_all()


async def test_cancelled_fetch_leaves_no_partial_file(folder: Path) -> None:
    head = Head()
    head.may_send.clear()
    one = supervisor(folder, head)
    getting = asyncio.create_task(one.get(ORDERED))
    await asyncio.sleep(0.05)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert list(folder.iterdir()) == []


async def test_bundle_is_not_kept_if_its_job_ends_during_the_fetch(folder: Path) -> None:
    head = Head()
    head.may_send.clear()
    one = supervisor(folder, head)
    getting = asyncio.create_task(one.get(ORDERED))
    await asyncio.sleep(0.05)
    one.release(DIGEST)
    head.may_send.set()
    with pytest.raises(BundleFetchError, match="its job has ended"):
        await getting
    assert list(folder.iterdir()) == []
    assert (await one.get(ORDERED)).exists()
    one.release_all()


async def test_error_for_an_unwritable_disk_contains_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")  # no folder can be made: as any OSError
    with pytest.raises(BundleFetchError) as caught:
        await supervisor(folder, Head()).get(ORDERED)
    assert "(0 MB) cannot be stored in" in str(caught.value)
    assert "Free space there, start the workers with another" in str(caught.value)


async def test_files_left_by_killed_processes_are_removed_by_the_next_one(folder: Path) -> None:
    folder.mkdir(parents=True)
    used = supervisor(folder, Head())
    await used.get(ORDERED)
    dead = "ab" * 32
    for suffix in ("", ".lock", ".part"):
        (folder / f"{dead}{suffix}").write_bytes(b"x")
    MachineBundles(Head().fetch).begin(folder)
    assert sorted(path.name for path in folder.iterdir()) == [DIGEST, f"{DIGEST}.lock"]
    used.release_all()


@pytest.mark.parametrize("plant", ["link", "open"])
async def test_folder_that_another_user_may_have_prepared_is_not_used(
    folder: Path, tmp_path: Path, plant: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "uv.lock").write_text("precious")
    folder.parent.mkdir()
    if plant == "link":
        folder.symlink_to(victim)
    else:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / f"{DIGEST}.part").symlink_to(victim / "uv.lock")

    one = supervisor(folder, Head())
    with pytest.raises(BundleFetchError, match=r"another user.*local-directory"):
        await one.get(ORDERED)

    assert [path.name for path in victim.iterdir()] == ["uv.lock"]
    assert (victim / "uv.lock").read_text() == "precious"


async def test_bundle_name_that_is_not_a_digest_is_refused(folder: Path) -> None:
    with pytest.raises(BundleFetchError, match="is not a SHA-256 digest"):
        await supervisor(folder, Head()).get(replace(ORDERED, digest="../../x"))
    assert os.listdir(folder.parent.parent) == []
