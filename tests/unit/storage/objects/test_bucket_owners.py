"""Review S7: requests name the account that a bucket must belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.errors import CheckpointError, RunStoreError, StoreError
from etrain_jupyter.plugins.ec2.machine.base_agent import open_node_bucket
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.checkpoints.s3 import S3Store
from etrain_jupyter.storage.objects import bucket_owners
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE, with_owner
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.storage.objects.s3_requests import S3Limits
from etrain_jupyter.testing.s3_faults import OWNED, OWNER, S3Fault
from etrain_jupyter.testing.s3_server import S3Server

STRANGER = "999999999999"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_owners, "_registered", {})
    monkeypatch.delenv(VARIABLE, raising=False)


def use_all(bucket: Bucket, folder: Path) -> None:
    """Make each kind of request once."""
    bucket.put("a", b"1", "test")
    bucket.put_if_absent("b", b"1", "test", token="t")
    assert bucket.get("a", "test") == b"1"
    assert bucket.get_aged("a", "test") is not None
    assert bucket.head("a", "test") is not None
    bucket.upload("big", memoryview(bytes(6 * MIB)), 6 * MIB, "test")
    bucket.download("big", 6 * MIB, folder / "big", "test")
    assert bucket.keys("x", "test") == []
    assert bucket.folders("test") == []
    assert bucket.uploads("x", "test") == []
    bucket.delete("a", "test")


def test_every_request_names_the_owner(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{s3_bucket}={OWNER}")
    limits = S3Limits(chunk_bytes=5 * MIB)
    s3_server.set_faults(S3Fault(kind="deny", match="partNumber=2", count=1))
    with pytest.raises(StoreError):  # so that an upload is aborted
        Bucket(s3_bucket, "p", limits).upload("c", memoryview(bytes(6 * MIB)), 6 * MIB, "test")
    use_all(Bucket(s3_bucket, "p", limits), tmp_path)
    node_bucket = open_node_bucket(f"s3://{s3_bucket}/p", region="us-east-1", owner=OWNER)
    node_bucket.put("node", b"1", "test")
    assert node_bucket.get("node", "test") is not None

    counts = s3_server.counts()
    num_requests = sum(counts.values()) - counts[OWNED] - counts["deny"]
    # The listing that checks for a wrong owner names none, on purpose.
    assert counts[OWNED] == num_requests - 1 > 10


def test_bucket_without_an_expected_owner_may_belong_to_any_account(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{s3_bucket}=any, other={STRANGER}")
    use_all(Bucket(s3_bucket, "p", S3Limits(chunk_bytes=5 * MIB)), tmp_path)
    assert OWNED not in s3_server.counts()


def test_bucket_of_another_account_is_refused_with_the_setting_to_change(
    s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{s3_bucket}={STRANGER}")
    words = (
        rf"does not belong to account {STRANGER}, but to another one.*None of its data was used.*"
        rf"{VARIABLE}={s3_bucket}=ACCOUNT, or bucket_owner in pools.yaml"
    )
    with pytest.raises(CheckpointError, match=words):
        S3Store(f"s3://{s3_bucket}/runs").begin(1)
    with pytest.raises(CheckpointError, match=words):
        S3Store(f"s3://{s3_bucket}/runs").list_steps()
    with pytest.raises(RunStoreError, match=words):
        RunObjects(f"s3://{s3_bucket}/runs").get("job.json")
    assert s3_server.list_keys(s3_bucket) == []


def test_role_without_list_permission_gets_both_reasons(
    s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{s3_bucket}={OWNER}")
    s3_server.set_faults(S3Fault(kind="deny"))
    with pytest.raises(CheckpointError, match=rf"access denied.*not owned by account {OWNER}"):
        S3Store(f"s3://{s3_bucket}/runs").begin(1)


def test_node_reports_a_bucket_of_another_account(s3_server: S3Server, s3_bucket: str) -> None:
    bucket = open_node_bucket(f"s3://{s3_bucket}/p", region="us-east-1", owner=STRANGER)
    words = f"config cannot be read in .* does not belong to account {STRANGER}"
    with pytest.raises(StoreError, match=words):
        bucket.get("config.json", "config cannot be read")
    with pytest.raises(StoreError, match=f"does not belong to account {STRANGER}"):
        bucket.put("nodes/i-1.json", b"{}", "test")
    assert s3_server.list_keys(s3_bucket) == []


@pytest.mark.parametrize("text", ["my-bucket", "my-bucket=12", "=111122223333", "b=ANY"])
def test_invalid_variable_is_an_error_before_any_request(
    s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(CheckpointError, match=rf"{VARIABLE} has '{text}'.*Write .*=111122223333"):
        S3Store(f"s3://{s3_bucket}/runs").list_steps()
    assert s3_server.counts() == {}


def test_existing_entry_of_the_variable_takes_precedence() -> None:
    assert with_owner("", "b", OWNER) == f"b={OWNER}"
    assert with_owner("b=any,c=any", "b", OWNER) == "b=any,c=any"
    assert with_owner("c=any", "b", "") == "c=any"
