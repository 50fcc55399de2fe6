"""Objects below a prefix of the simulated S3, which tests read and change directly."""

from __future__ import annotations

from etrain_jupyter.testing.s3_server import S3Server


class S3Folder:
    def __init__(self, server: S3Server, url: str) -> None:
        self.server = server
        self.bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/"

    def list_keys(self) -> set[str]:
        keys = self.server.list_keys(self.bucket, self.prefix)
        return {key.removeprefix(self.prefix) for key in keys}

    def read(self, key: str) -> bytes:
        return self.server.read(self.bucket, self.prefix + key)

    def write(self, key: str, data: bytes) -> None:
        self.server.write(self.bucket, self.prefix + key, data)

    def remove(self, key: str) -> None:
        self.server.remove(self.bucket, self.prefix + key)
