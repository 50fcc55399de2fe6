"""Every checkpoint store passes the shipped contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.checkpoints import LocalStore
from etrain_jupyter.testing.store_contract import StoreContract


class FolderPlace:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> LocalStore:
        return LocalStore(self.root)

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
