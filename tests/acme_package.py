"""A package that registers a logger with an entry point, as a stranger would write it."""

from __future__ import annotations

import json
from pathlib import Path

SOURCE = '''
"""Logger for the tool Acme: appends lines of JSON to a file per revision of a job."""

import json
from pathlib import Path

from etrain_jupyter.log.loggers.base import Values


class AcmeLogger:
    def __init__(self, folder):
        self.folder = Path(folder)

    @classmethod
    def from_entry(cls, entry):
        if not entry.values.get("folder"):
            raise entry.error("log.to: acme needs a folder", hint="acme: {folder: boards}")
        return cls(entry.values["folder"])

    @property
    def options(self):
        return {"folder": str(self.folder)}

    def open(self, run):
        print("chatter of a library", flush=True)
        if (self.folder / "down").exists():
            (self.folder / "down").unlink()
            raise OSError("acme is down")
        self.folder.mkdir(exist_ok=True)
        self.path = self.folder / f"{run.job_id}-{run.revision}.jsonl"
        for other in self.folder.glob(f"{run.job_id}-*.jsonl"):
            if other != self.path:
                other.unlink()
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0

    def write(self, records):
        with self.path.open("a") as file:
            for record in records:
                values = dict(record.values) if isinstance(record, Values) else {}
                row = {"number": record.number, "step": record.step, **values}
                file.write(json.dumps(row) + "\\n")

    def drop_after(self, step, time):
        return False

    def close(self, status):
        (self.folder / "status").write_text(str(status))
'''

ENTRY_POINTS = """\
[etrain_jupyter.loggers]
acme = acme_etrain:AcmeLogger
broken = acme_etrain:Missing
"""


def install_acme(site: Path) -> None:
    """Install the package into a folder, which must be in ``PYTHONPATH``."""
    metadata = site / "acme_etrain-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "acme_etrain.py").write_text(SOURCE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-etrain\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Return the complete rows of the only revision in a folder of Acme; empty if it has none."""
    files = list(folder.glob("*.jsonl"))
    if not files:
        return []
    [file] = files
    try:
        text = file.read_text()
    except FileNotFoundError:  # the logger has just removed this revision
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def status_of(folder: Path) -> str:
    """Return the final status in a folder of Acme; empty if it has none."""
    path = folder / "status"
    return path.read_text() if path.exists() else ""


def losses_of(folder: Path) -> list[tuple[int, float]]:
    """Return (step, training loss) in the order of the rows."""
    rows = rows_of(folder)
    return [(int(row["step"]), row["train/loss"]) for row in rows if "train/loss" in row]
