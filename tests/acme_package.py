"""A package with a plug-in that adds a kind of pool, a sub-command and a logger from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etrain_jupyter import plugin

SOURCE = '''
"""Plug-in for the tool Acme. Its logger appends lines of JSON to a file per revision of a job."""

import json
from pathlib import Path

from etrain_jupyter.config.fields import Section
from etrain_jupyter.log.loggers.base import Values
from etrain_jupyter.plugin import Command, Plugin, PoolKind
from etrain_jupyter.pools.base import CostReport
from etrain_jupyter.pools.detached import DetachedPool
from etrain_jupyter.process.cluster_settings import ClusterSettings

PLUGIN = Plugin(
    pools={
        "acme": PoolKind(
            make="acme_etrain:make_pool", prefix="acme", of_cluster="acme_etrain:pool_of_cluster"
        )
    },
    commands=(Command(run="acme_etrain:greet", after="show"),),
    loggers={"acme": "acme_etrain:AcmeLogger", "broken": "acme_etrain:Missing"},
)


class AcmeSpec(Section):
    slots: int = 1


class AcmePool(DetachedPool):
    """Worker processes on this machine, in clusters of their own."""

    def __init__(self, name, spec, *, cluster_id=None):
        super().__init__(name=name, prefix="acme-pool", cluster_id=cluster_id)
        self._spec = spec

    def settings(self):
        return ClusterSettings(
            pool=self.name, prefix="acme-pool", max_cpu_slots=self._spec.slots, idle_s=60.0
        )

    def prepare_start(self, root):
        return None

    def shared_place(self):
        return ""

    def price(self, max_workers):
        return f"{max_workers} favours"

    def cost(self):
        return CostReport()


def make_pool(entry):
    return AcmePool(entry.name, entry.read_as(AcmeSpec))


def pool_of_cluster(cluster):
    return AcmePool(cluster.settings().pool, AcmeSpec(), cluster_id=cluster.cluster_id)


def greet(surface, name: str, *, loud: bool = False) -> str:
    """Greet someone.

    Args:
        name: Who is greeted.
        loud: Add an exclamation mark.

    Example:
        greet Ada
    """
    return f"hello {name}" + "!" * loud


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
[etrain_jupyter.plugins]
acme = acme_etrain:PLUGIN
missing = acme_etrain:NOTHING
"""


def install_acme(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package for this process and its children; ``site`` must not exist."""
    metadata = site / "acme_etrain-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "acme_etrain.py").write_text(SOURCE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-etrain\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    # This process may have looked for plug-ins before.
    monkeypatch.setattr(plugin, "installed", plugin.installed.__wrapped__)


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
