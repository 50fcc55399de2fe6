"""What the S3 store does beyond the contract of all stores."""

from __future__ import annotations

import builtins
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import CheckpointError, StoreError
from etrain_jupyter.storage.checkpoints import open_store, place_of_job
from etrain_jupyter.storage.checkpoints.files import new_scratch_file, remove_unlocked_scratch
from etrain_jupyter.storage.checkpoints.s3 import S3Store
from etrain_jupyter.storage.objects.s3_messages import message_of
from etrain_jupyter.storage.objects.s3_requests import S3Limits
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from etrain_jupyter.testing.store_contract import save

MIB = 1 << 20
IN_CHUNKS = S3Limits(chunk_bytes=5 * MIB)
"""The smallest that S3 takes."""
BIG = os.urandom(12 * MIB + 7)


def open_uploads(store: S3Store) -> list[tuple[str, str]]:
    return store._bucket.uploads("checkpoints", "uploads")


@pytest.mark.parametrize("source", ["bytes", "file"])
def test_large_part_is_uploaded_and_downloaded_in_pieces(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, source: str
) -> None:
    store = S3Store(f"s3://{s3_bucket}", limits=IN_CHUNKS)
    (tmp_path / "big").write_bytes(BIG)
    part = store.put_part(store.begin(1), "big", BIG if source == "bytes" else tmp_path / "big")
    counts = s3_server.counts()
    assert (counts["POST uploads"], counts["PUT uploadId"], counts["POST uploadId"]) == (1, 3, 1)
    assert "GET" not in counts  # S3 vouched for the bytes
    assert S3Store(f"s3://{s3_bucket}", limits=IN_CHUNKS).get_part(part).read_bytes() == BIG
    assert s3_server.counts()["GET"] == 3
    with pytest.raises(CheckpointError, match="never used twice"):
        store.put_part("checkpoints/step_00000001", "big", BIG)
    assert open_uploads(store) == []


@pytest.mark.parametrize("kind", ["reset", "lose_answer", "spoil_upload", "truncate"])
def test_large_part_survives_failures_of_single_requests(
    s3_server: S3Server, s3_bucket: str, no_pauses: None, kind: Any
) -> None:
    store = S3Store(f"s3://{s3_bucket}", limits=IN_CHUNKS)
    folder = store.begin(1)
    s3_server.set_faults(S3Fault(kind=kind, every=3))
    part = store.put_part(folder, "big", BIG)
    assert store.get_part(part).read_bytes() == BIG
    assert s3_server.counts()[kind] > 0
    assert open_uploads(store) == []


def test_failed_upload_is_aborted(s3_server: S3Server, s3_bucket: str) -> None:
    store = S3Store(f"s3://{s3_bucket}", limits=IN_CHUNKS)
    folder = store.begin(1)
    s3_server.set_faults(S3Fault(kind="deny", match="partNumber=2"))
    with pytest.raises(CheckpointError, match=r"step_00000001/big cannot be written.*access deni"):
        store.put_part(folder, "big", BIG)
    assert open_uploads(store) == []
    assert s3_server.list_keys(s3_bucket) == ["checkpoints/step_00000001/.begun"]


def test_upload_left_by_a_crash_is_removed_by_the_next_clean_up(
    s3_server: S3Server, s3_bucket: str
) -> None:
    store = S3Store(f"s3://{s3_bucket}", limits=IN_CHUNKS)
    s3_server.set_faults(
        S3Fault(kind="deny", match="partNumber=2"), S3Fault(kind="deny", match="DELETE")
    )
    for step in (1, 9):
        with pytest.raises(CheckpointError):
            store.put_part(store.begin(step), "big", BIG)
    s3_server.set_faults()
    store.commit(save(store, 5))
    assert store.prune([5]) == ["checkpoints/step_00000001"]
    assert [key for key, _ in open_uploads(store)] == ["checkpoints/step_00000009/big"]


def test_old_parts_are_deleted_although_uploads_may_not_be_listed(
    s3_server: S3Server, s3_bucket: str
) -> None:
    """Review R3: a role without ListBucketMultipartUploads kept every part for ever."""
    store = S3Store(f"s3://{s3_bucket}")
    s3_server.set_faults(S3Fault(kind="deny", match="?uploads"))
    for step in (1, 2, 3):
        store.commit(save(store, step))
        store.prune([step])
    keys = s3_server.list_keys(s3_bucket)
    assert keys
    assert all("step_00000003" in key for key in keys)
    assert "s3:ListBucketMultipartUploads" in store.notice
    assert s3_server.counts()["deny"] == 1  # it is not asked again


def test_old_parts_are_deleted_although_listing_uploads_fails(
    s3_server: S3Server, s3_bucket: str, no_pauses: None
) -> None:
    """Review R3: an error other than a denial does not stop it either, and is retried."""
    store = S3Store(f"s3://{s3_bucket}")
    store.commit(save(store, 1))
    store.commit(save(store, 2))
    s3_server.set_faults(S3Fault(kind="internal_error", match="?uploads"))
    assert "checkpoints/step_00000001" in store.prune([2])
    assert "Old checkpoints were deleted nevertheless" in store.notice
    s3_server.set_faults()
    store.prune([2])
    assert store.notice == ""


def test_part_without_a_checksum_from_s3_is_read_back(
    s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(f"s3://{s3_bucket}")
    head = store._bucket.head

    def head_without_checksum(key: str, what: str) -> dict[str, Any] | None:
        known = head(key, what)
        return {k: v for k, v in known.items() if k != "ChecksumSHA256"} if known else None

    monkeypatch.setattr(store._bucket, "head", head_without_checksum)
    store.put_part(store.begin(1), "part", b"weights")
    assert s3_server.counts()["GET"] == 1
    s3_server.set_faults(S3Fault(kind="spoil_answer", match="GET /"))
    with pytest.raises(CheckpointError, match="was altered"):
        store.put_part(store.begin(1), "part", b"weights")


def test_endpoint_that_ignores_conditions_is_refused(s3_server: S3Server, s3_bucket: str) -> None:
    s3_server.set_faults(S3Fault(kind="ignore_conditions"))
    with pytest.raises(
        CheckpointError, match=r"127\.0\.0\.1.* ignores the condition If-None-Match"
    ):
        S3Store(f"s3://{s3_bucket}").begin(1)


def test_manifests_on_several_pages_are_all_listed(s3_server: S3Server, s3_bucket: str) -> None:
    for step in range(1, 8):
        s3_server.write(s3_bucket, f"runs/manifests/step_{step:08d}.json", b"{}")
    s3_server.write(s3_bucket, "runs/manifests/readme.txt", b"mine")
    s3_server.write(s3_bucket, "runs2/manifests/step_00009999.json", b"{}")
    store = S3Store(f"s3://{s3_bucket}/runs/", limits=S3Limits(page_size=3))
    assert store.list_steps() == [1, 2, 3, 4, 5, 6, 7]
    assert s3_server.counts()["GET list-type"] == 3


def test_new_credentials_are_found_without_a_restart(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    keys = "[lab]\naws_access_key_id = {}\naws_secret_access_key = s\n"
    store = S3Store(f"s3://{s3_bucket}")
    with pytest.raises(CheckpointError, match="the profile of AWS_PROFILE is not in"):
        store.begin(1)
    (tmp_path / "aws_credentials").write_text(keys.format("OLDKEY"))
    s3_server.set_faults(S3Fault(kind="expire", match="OLDKEY"))
    with pytest.raises(CheckpointError, match=r"have expired.*aws sso login") as caught:
        store.begin(1)
    assert "OLDKEY" not in str(caught.value)
    (tmp_path / "aws_credentials").write_text(keys.format("NEWKEY"))
    assert store.begin(1) == "checkpoints/step_00000001"


def test_missing_credentials_are_explained(
    s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(CheckpointError, match="there are no AWS credentials on this worker"):
        S3Store(f"s3://{s3_bucket}").list_steps()


def test_missing_bucket_and_dead_endpoint_are_explained(
    s3_server: S3Server, no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"s3://no-such: there is no such bucket\. Create it"):
        S3Store("s3://no-such").begin(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"the endpoint cannot be reached\. Check AWS_EN"):
        S3Store("s3://no-such").list_steps()


@pytest.mark.parametrize("read", ["get", "head"])
def test_denied_access_to_a_missing_object_is_not_an_error(
    s3_server: S3Server, s3_bucket: str, read: str
) -> None:
    # S3 answers so to a role that may not list the whole bucket; it may list its own folder.
    bucket = S3Store(f"s3://{s3_bucket}")._bucket
    bucket.put("there.json", b"x", "test")
    s3_server.set_faults(S3Fault(kind="deny", match=".json?"))

    assert getattr(bucket, read)("absent.json", "test") is None
    with pytest.raises(StoreError, match="access denied"):
        getattr(bucket, read)("there.json", "test")

    s3_server.set_faults(S3Fault(kind="deny"))
    with pytest.raises(StoreError, match="access denied"):
        getattr(bucket, read)("absent.json", "test")


def test_server_that_never_answers_causes_a_timeout(
    s3_server: S3Server, s3_bucket: str, no_pauses: None
) -> None:
    limits = S3Limits(read_timeout_s=0.1, num_requests=2, num_attempts=2)
    s3_server.set_faults(S3Fault(kind="slow", seconds=1.0))
    with pytest.raises(CheckpointError, match="the response timed out"):
        S3Store(f"s3://{s3_bucket}", limits=limits).list_steps()
    assert s3_server.counts()["GET list-type"] == 4


def test_secrets_in_a_message_of_s3_are_not_shown() -> None:
    from botocore.exceptions import ClientError

    message = "key AKIAABCDEFGHIJKLMNOP signature=abc/def= is odd"
    exc = ClientError({"Error": {"Code": "Odd", "Message": message}}, "PutObject")
    assert message_of(exc) == "Odd: key … … is odd"


def test_copy_of_a_part_is_deleted_when_unreferenced(s3_server: S3Server, s3_bucket: str) -> None:
    store = S3Store(f"s3://{s3_bucket}")
    part = store.put_part(store.begin(1), "part", b"weights")
    path = store.get_part(part)
    name = os.fspath(path)
    assert store.get_part(part) is path
    assert s3_server.counts()["GET"] == 1
    del path
    gc.collect()
    assert not os.path.exists(name)


def test_scratch_of_a_killed_process_is_removed_and_that_of_a_live_one_kept(
    s3_server: S3Server, s3_bucket: str
) -> None:
    store = S3Store(f"s3://{s3_bucket}")
    copy = store.get_part(store.put_part(store.begin(1), "part", b"weights"))
    left = Path(tempfile.mkdtemp(prefix="etrain-checkpoint-"))
    (left / "lock").touch()
    (left / "copy").write_bytes(b"weights")
    remove_unlocked_scratch(age_s=60)
    assert left.is_dir()  # perhaps it is not locked yet
    remove_unlocked_scratch(age_s=0)
    assert not left.exists()
    assert copy.read_bytes() == b"weights"


def test_missing_boto3_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "boto3":
            raise ModuleNotFoundError("No module named 'boto3'", name="boto3")
        return real(name, *args, **kwargs)

    with_boto3 = ("etrain_jupyter.storage.checkpoints.s3", "etrain_jupyter.storage.objects.s3")
    for name in [name for name in sys.modules if name.startswith(with_boto3)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(CheckpointError, match=r'needs boto3.*pip install "etrain-jupyter\[s3\]"'):
        open_store("s3://bucket/run")


def test_each_job_has_its_own_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert place_of_job("s3://bucket", "job-1") == "s3://bucket/job-1"
    assert place_of_job("s3://bucket/runs/", "job-1") == "s3://bucket/runs/job-1"
    assert place_of_job("~/runs", "job-1") == "/somewhere/runs/job-1"
    assert str(open_store("s3://bucket/runs/job-1")) == "s3://bucket/runs/job-1"


@pytest.mark.parametrize(
    ("where", "expected"),
    [("environment", (2, "adaptive")), ("profile", (2, "adaptive")), ("", (4, "standard"))],
)
def test_retry_settings_of_the_user_override_ours(
    s3_server: S3Server,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    expected: tuple[int, str],
) -> None:
    if where == "environment":
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        monkeypatch.setenv("AWS_RETRY_MODE", "adaptive")
    elif where == "profile":
        text = "[default]\nmax_attempts = 2\nretry_mode = adaptive\n"
        Path(os.environ["AWS_CONFIG_FILE"]).write_text(text)

    retries = S3Store(f"s3://{s3_bucket}")._bucket.connect().meta.config.retries

    assert (retries["total_max_attempts"], retries["mode"]) == expected


def test_progress_of_a_large_part_is_reported_piece_by_piece(
    s3_server: S3Server, s3_bucket: str
) -> None:
    store = S3Store(f"s3://{s3_bucket}", limits=IN_CHUNKS)
    told: list[int] = []
    store.put_part(store.begin(1), "big", BIG, progress=told.append)
    assert sorted(told, reverse=True) == [5 * MIB, 5 * MIB, 2 * MIB + 7]


def test_scratch_file_is_removed_with_its_path_but_not_with_derived_paths() -> None:
    path = new_scratch_file()
    path.write_bytes(b"weights")
    name = os.fspath(path)

    path.with_name(path.name)
    gc.collect()
    assert os.path.exists(name)
    del path
    gc.collect()
    assert not os.path.exists(name)
