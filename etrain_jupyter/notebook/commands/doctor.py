"""Diagnose problems of this machine and suggest fixes: ``%etrain doctor``.

All checks are read-only. None of them imports torch, which would increase the memory use of a
kernel that does not need it. Accounts are queried only on request, with a short timeout.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from etrain_jupyter import __version__
from etrain_jupyter.display.numbers import counted
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.notebook.job.link import open_link
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, RunStore
from etrain_jupyter.plugin import load, pool_kinds
from etrain_jupyter.pools.catalog import PoolEntry, files, read_catalog
from etrain_jupyter.pools.clusters import location_of
from etrain_jupyter.pools.registry import make_pool
from etrain_jupyter.process.cluster_dir import cluster_dirs
from etrain_jupyter.process.gpus import finish_gpu_query, start_gpu_query, torch_has_cuda
from etrain_jupyter.process.state_root import state_root
from etrain_jupyter.process.tls import mint_certificates, read_security, write_certificates
from etrain_jupyter.wire.requests import DescribeCluster

NEEDED = ("torch", "distributed", "cloudpickle", "safetensors", "pydantic", "ipykernel")
FOR_THE_SCREEN = ("jupyterlab", "anywidget")
EXTENSION = "etrain-jupyter"
WIDGET_SCRIPT = Path(__file__).parents[2] / "static" / "widget.js"
GUIDE = "docs/how-to/troubleshoot.md"
MARKS = {"ok": "  ok ", "note": "note ", "wrong": "WRONG"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    state: str
    """``ok``, ``note`` (works with limitations) or ``wrong``."""
    what: str
    remedy: str = ""
    """Suggested fix; empty if no action is needed."""
    topic: str = ""
    """The section of docs/how-to/troubleshoot.md with more details."""

    def __str__(self) -> str:
        line = f"{MARKS[self.state]} {self.what}"
        more = f" ({GUIDE}#{self.topic})" if self.topic and self.state != "ok" else ""
        return f"{line}\n      -> {self.remedy}{more}" if self.remedy else line


def examine(store: RunStore, *, with_all: bool = False, region: str | None = None) -> list[Finding]:
    """Check everything that a job needs on this machine; report an exception as a finding.

    ``with_all`` also checks all clusters in the user's accounts, those in ``region`` too.
    """
    checks: dict[str, Callable[[], list[Finding]]] = {
        "python": _check_python,
        "packages": _check_packages,
        "gpu": _check_gpus,
        "screen": _check_screen,
        "tls": _check_tls,
        "state-directory": lambda: [_check_folder("state directory", state_root(), "ETRAIN_STATE")],
        "run-store": lambda: [_check_run_store(store)],
        "pools": lambda: _check_pools() + (_check_all_clusters(region) if with_all else []),
        "clusters": _check_clusters,
    }
    findings = []
    # Ordered so that causes precede effects: a missing package explains a failing pool.
    for topic, check in checks.items():
        try:
            found = check()
        except Exception as exc:  # A bug in one check must not hide the results of the others.
            what, remedy = f"{type(exc).__name__}: {exc}", "see the guide"
            found = [Finding(state="wrong", what=what, remedy=remedy)]
        findings += [replace(finding, topic=topic) for finding in found]
    return findings


def _check_python() -> list[Finding]:
    what = f"etrain-jupyter {__version__}, Python {platform.python_version()}, {sys.platform}"
    if sys.platform != "linux":
        return [Finding(state="note", what=what, remedy="only Linux is tested")]
    return [Finding(state="ok", what=what)]


def _find_packages(names: Iterable[str], *, if_missing: str) -> list[Finding]:
    findings = []
    for name in names:
        version = version_of(name)
        state, remedy = ("ok", "") if version else (if_missing, f"pip install {name}")
        findings.append(Finding(state=state, what=f"{name} {version or 'missing'}", remedy=remedy))
    return findings


def _check_packages() -> list[Finding]:
    findings = _find_packages(NEEDED, if_missing="wrong")
    kernel = version_of("ipykernel")
    # Subshells are new in ipykernel 7: they handle a message from the dashboard while a cell runs.
    if kernel and int(kernel.split(".")[0]) < 7:
        findings.append(
            Finding(
                state="note",
                what=f"ipykernel {kernel}: the Stop button waits while a cell computes",
                remedy="pip install -U 'ipykernel>=7'; or interrupt the kernel in %etrain wait",
            )
        )
    return findings


def _check_gpus() -> list[Finding]:
    # Training would work, but on the CPU: pip may have installed the wrong build of torch.
    if shutil.which("nvidia-smi") and not torch_has_cuda():
        what = (
            f"an NVIDIA driver is installed, but torch {version_of('torch')} is built without CUDA"
        )
        return [Finding(state="note", what=what, remedy="install a CUDA build, see pytorch.org")]
    gpus = finish_gpu_query(start_gpu_query(), timeout_s=5.0)
    if not gpus:
        cores = os.cpu_count() or 1
        return [Finding(state="ok", what=f"no GPU here: workers share {cores} CPU cores")]
    names = ", ".join(name for _, name in gpus)
    return [Finding(state="ok", what=f"{len(gpus)} GPU: {names}")]


def _check_screen() -> list[Finding]:
    findings = _find_packages(FOR_THE_SCREEN, if_missing="note")
    if not WIDGET_SCRIPT.is_file():
        remedy = "pip install a wheel, or build the front end: make lab"
        what = "the widget is not built: notebooks show the job as HTML"
        findings.append(Finding(state="wrong", what=what, remedy=remedy))
    # The extension must be where JupyterLab runs, which may not be the kernel's environment.
    found = find_extension()
    if found is None:
        remedy = "pip install --force-reinstall etrain-jupyter where JupyterLab runs"
        what = "JupyterLab's extension is not installed in this environment"
        findings.append(Finding(state="note", what=what, remedy=remedy))
    else:
        findings.append(Finding(state="ok", what=f"JupyterLab extension in {found}"))
    return findings


def _check_tls() -> list[Finding]:
    # Make and load certificates as a cluster does. A failure is an exception, which examine()
    # reports.
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path(folder) / "tls"
        write_certificates(certificates, mint_certificates("doctor"))
        read_security(certificates, "client").get_connection_args("client")
    return [Finding(state="ok", what=f"TLS on loopback ({ssl.OPENSSL_VERSION})")]


def _check_folder(what: str, folder: Path, variable: str) -> Finding:
    # A missing folder is created when it is needed, so check its nearest existing parent instead.
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Finding(state="ok", what=f"{what} {folder}")
    remedy = f"make it writable, or set {variable} to a folder of yours"
    return Finding(state="wrong", what=f"{what} {folder} cannot be written", remedy=remedy)


def _check_run_store(store: RunStore) -> Finding:
    try:
        store.check_writable()
    except EtrainError as exc:
        return Finding(
            state="wrong", what=str(exc), remedy=f"set {ROOT_VARIABLE} to another location"
        )
    # The local copies of a bucket are in a folder, which must be writable too.
    copies = _check_folder(f"run store {store}, its copies in", store.root, "ETRAIN_STATE")
    is_folder = str(store) == str(store.root)
    return _check_folder("run store", store.root, ROOT_VARIABLE) if is_folder else copies


def _check_pools() -> list[Finding]:
    try:
        entries = list(read_catalog().values())
    except ConfigError as exc:
        return [fault_of(exc)]
    if not entries:
        names = " or ".join(map(str, files()))
        return [Finding(state="ok", what=f"pool local; define others in {names}")]
    findings = []
    valid: dict[str, list[PoolEntry]] = {}
    for entry in entries:
        try:
            make_pool(entry).check_machine()
        except EtrainError as exc:
            findings.append(fault_of(exc))
            continue
        what = f"pool {entry.name}: {entry.kind}{location_of(entry)} ({entry.file})"
        findings.append(Finding(state="ok", what=what))
        valid.setdefault(entry.kind, []).append(entry)
    kinds = pool_kinds()
    for name, known in valid.items():
        if name in kinds and kinds[name].check:
            findings += load(kinds[name].check)(known)
    return findings


def _check_all_clusters(region: str | None) -> list[Finding]:
    checks = [kind.check_all for kind in pool_kinds().values() if kind.check_all]
    return [finding for check in checks for finding in load(check)(region)]


def fault_of(exc: EtrainError) -> Finding:
    """Return the finding for an error."""
    what = exc.render()[0].removeprefix("etrain: ")
    # Only a ConfigError has a hint.
    hint = getattr(exc, "hint", "") or "correct it, or remove the pool"
    return Finding(state="wrong", what=what, remedy=hint)


def _check_clusters() -> list[Finding]:
    findings = []
    for cluster in cluster_dirs():
        record = cluster.record()
        # The folder exists before the scheduler has written its record, and after it has exited.
        if record is None or not record.is_alive:
            what = f"cluster {cluster.cluster_id} has ended or is starting"
            findings.append(Finding(state="note", what=what, remedy="%etrain down removes it"))
            continue
        link = open_link(cluster.address(record))
        try:
            facts = link.call(DescribeCluster(), timeout=5.0)
            workers = counted(facts.workers, "worker")
            jobs = counted(facts.jobs, "job")
            what = f"cluster {cluster.cluster_id}: {workers}, {jobs}"
            findings.append(Finding(state="ok", what=what))
        except EtrainError as exc:
            what = f"cluster {cluster.cluster_id} does not respond ({exc})"
            findings.append(Finding(state="wrong", what=what, remedy="%etrain down ends it"))
        finally:
            link.release()
    return findings or [Finding(state="ok", what="no cluster is running")]


def version_of(name: str) -> str:
    """Return the installed version of a package without importing it; empty if not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_extension() -> Path | None:
    """Return the path where JupyterLab finds the extension; None if it is not installed."""
    try:
        from jupyter_core.paths import jupyter_path
    except ImportError:
        return None
    folders = (Path(path) / EXTENSION for path in jupyter_path("labextensions"))
    return next((folder for folder in folders if (folder / "package.json").is_file()), None)
