"""Address of a Dask scheduler, and the TLS files needed to connect to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SchedulerAddress:
    """Address of a cluster's scheduler, with the certificates needed to connect to it."""

    address: str
    """For example ``tls://127.0.0.1:40231``."""
    cluster_id: str
    """Unique over all clusters of a user."""
    state_dir: str = ""
    """Folder of the cluster's state on this machine; empty for a cluster started by other tools."""
    tls_dir: str = ""
    """Folder with the certificates that etrain generated; empty for a scheduler without them."""
    tls_ca: str = ""
    """File with the certificate authority of a foreign scheduler. This file and the two below are
    read in place and never copied."""
    tls_cert: str = ""
    """File with the client certificate for a foreign scheduler."""
    tls_key: str = ""
    """File with the private key of ``tls_cert``."""
    tls_min_version: str = ""
    """Minimum TLS version of a foreign scheduler, ``1.2`` or ``1.3``; empty for Dask's default."""

    def security(self) -> Any:
        """Return the ``distributed.Security`` of a client.

        Raises:
            FileNotFoundError: If the certificates were deleted, as they are when the cluster ends.
        """
        from etrain_jupyter.process.tls import read_foreign_security, read_security

        if self.tls_ca:
            files = (self.tls_ca, self.tls_cert, self.tls_key)
            return read_foreign_security(*files, min_version=self.tls_min_version)
        return read_security(self.tls_dir, "client")

    def connection_args(self) -> dict[str, Any]:
        """Return the keyword arguments for ``distributed.core.rpc(address, connection_args=...)``.

        Raises:
            FileNotFoundError: If the certificates were deleted, as they are when the cluster ends.
        """
        if not self.tls_dir and not self.tls_ca:
            return {}
        from etrain_jupyter.process.peers import pinned_to_scheduler

        args: dict[str, Any] = self.security().get_connection_args("client")
        # Only our own certificates name a role; a foreign scheduler's may have any name.
        return pinned_to_scheduler(args) if self.tls_dir else args

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form, stored in a run's ``job.json`` under ``cluster``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> SchedulerAddress:
        """Rebuild from the JSON form; unknown keys are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})
