"""Every checkpoint store passes the shipped contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.storage.checkpoints import LocalStore
from etrain_jupyter.storage.checkpoints.s3 import S3Store
from etrain_jupyter.storage.objects.s3_requests import S3Limits
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from etrain_jupyter.testing.store_contract import StoreContract
from tests.s3_folder import S3Folder

MIB = 1 << 20


class FolderPlace:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> LocalStore:
        return LocalStore(self.root, block_bytes=MIB)

    def list_keys(self) -> set[str]:
        return {
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*")
            if path.is_file()
        }

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def remove(self, key: str) -> None:
        (self.root / key).unlink()


class TestLocalStore(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> FolderPlace:
        return FolderPlace(tmp_path / "run")


class BucketPlace(S3Folder):
    def open(self) -> S3Store:
        return S3Store(f"s3://{self.bucket}/{self.prefix}", limits=S3Limits(chunk_bytes=5 * MIB))


class TestS3Store(StoreContract):
    @pytest.fixture
    def place(self, s3_server: S3Server, s3_bucket: str) -> BucketPlace:
        return BucketPlace(s3_server, f"s3://{s3_bucket}/runs/mine")


class TestS3StoreWithFaults(StoreContract):
    """The same contract with faults that retries must handle; a request may hit several."""

    @pytest.fixture
    def place(self, s3_server: S3Server, s3_bucket: str, no_pauses: None) -> BucketPlace:
        s3_server.set_faults(
            S3Fault(kind="slow_down", every=13),
            S3Fault(kind="internal_error", every=41),
            S3Fault(kind="slow", every=17, seconds=0.02),
            S3Fault(kind="reset", every=17),
            S3Fault(kind="lose_answer", every=19),
            S3Fault(kind="truncate", every=23),
            S3Fault(kind="spoil_upload", every=5, match="PUT "),
            S3Fault(kind="spoil_answer", every=3, match="model.safetensors"),
        )
        return BucketPlace(s3_server, f"s3://{s3_bucket}/runs/mine")
