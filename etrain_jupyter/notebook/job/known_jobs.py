"""Names and ids of the jobs on this machine's disk, for completion."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from etrain_jupyter.notebook.job.job_record import RECORD_FILE
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, default_root
from etrain_jupyter.storage.bucket_log.place import is_remote, spool_of_root

_ID = re.compile(r"(.+)-[0-9a-f]{8}")


def list_known_jobs(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Scan the folder once, and return the names and then the ids of known jobs, newest first.

    This neither reads records nor accesses buckets. If the run store is in a bucket, only jobs with
    a copy on this machine are listed. Unreadable entries are skipped.
    """
    root = environment.get(ROOT_VARIABLE)
    # Completion must be fast, so read the local copies of a bucket only.
    folder = spool_of_root(root) if root and is_remote(root) else default_root(environment)
    found = sorted(_jobs_in(folder), reverse=True)
    ids = [job_id for _, job_id in found]
    names = [match[1] for match in map(_ID.fullmatch, ids) if match]
    return list(dict.fromkeys([*names, *ids]))


def _jobs_in(folder: Path) -> list[tuple[float, str]]:
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):  # a job that is being created
                    continue
                # The record is replaced at each resume, so its modification time is that of the
                # last resume.
                try:
                    modified = os.stat(os.path.join(entry.path, RECORD_FILE)).st_mtime
                except OSError:
                    continue
                found.append((modified, entry.name))
    except OSError:
        return []
    return found
