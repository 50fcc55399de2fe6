"""A cluster's folder on the disk that the head and its SLURM jobs share.

::

    <folder>/slurm-4f0c21-9ab2c3/     0700
    ├── scheduler.json      address of the current scheduler; removed first when the cluster ends
    ├── tls/                certificate authority, and the workers' certificate and key; 0600
    ├── logs/               output of the jobs, unless ``log_folder`` is set
    └── scratch/            Dask's folders of the workers
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from etrain_jupyter.errors import PoolError
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.tls import write_certificates
from etrain_jupyter.untrusted import is_private_folder

TLS_FILES = ("ca.pem", "worker.pem", "worker.key")
"""Files that workers need. The keys of the scheduler and of clients stay on the head's machine."""
TAIL_BYTES = 20_000


@dataclass(frozen=True)
class Site:
    """Folder of one cluster on the shared disk."""

    path: Path

    @property
    def tls(self) -> Path:
        """Folder of the workers' certificates."""
        return self.path / "tls"

    @property
    def scratch(self) -> Path:
        """Folder for Dask's folders."""
        return self.path / "scratch"

    def prepare(self, certificates: Path) -> None:
        """Create the folder, or use that of the previous scheduler; copy the certificates.

        Raises:
            PoolError: If the folder cannot be created, or other users can write to it.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.path, self.scratch):
                folder.mkdir(mode=0o700, exist_ok=True)
            if not self.tls.exists():
                texts = {name: (certificates / name).read_text() for name in TLS_FILES}
                write_certificates(self.tls, texts)
        except OSError as exc:
            raise PoolError(
                f"the folder {self.path} cannot be created ({exc.strerror}). Nothing was "
                "submitted. Write folder: PATH in pools.yaml, on a disk that the nodes share."
            ) from exc
        for folder in (self.path, self.tls):
            if not is_private_folder(folder):
                raise PoolError(
                    f"the folder {folder} belongs to another user, or others can write to it. "
                    "Nothing was submitted. Write another folder: PATH in pools.yaml."
                )

    def publish(self, address: str, *, num_lives: int) -> None:
        """Write the scheduler's address, for the workers."""
        write_private(self.record, json.dumps({"scheduler": address, "num_lives": num_lives}))

    @property
    def record(self) -> Path:
        """File with the address of the current scheduler."""
        return self.path / "scheduler.json"

    def retract(self) -> None:
        """Remove the address: workers that lose their connection shut down."""
        with contextlib.suppress(OSError):
            self.record.unlink(missing_ok=True)

    def log_tail(self, job_name: str, folder: Path | None, num_lines: int = 12) -> str:
        """Return the last lines that a job wrote; empty if it wrote none.

        ``folder`` is that of the logs; None for that of the cluster.
        """
        lines: list[str] = []
        for path in sorted((folder or self.path / "logs").glob(f"{job_name}-*.err")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                lines += file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def remove(self) -> None:
        """Delete the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
