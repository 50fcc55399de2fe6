"""What is wrong on this machine, and how to mend it: ``%etrain doctor``.

Each check looks and changes nothing, and none imports torch: a kernel that only looks stays small.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import ssl
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from etrain_jupyter import __version__
from etrain_jupyter.errors import EtrainError
from etrain_jupyter.job.link import link_to
from etrain_jupyter.job.run_store import ROOT_VARIABLE, RunStore
from etrain_jupyter.pools.local_nodes import finish_gpu_query, start_gpu_query, torch_has_cuda
from etrain_jupyter.pools.state_dir import cluster_dirs, state_root
from etrain_jupyter.pools.tls import mint_certificates, read_security, write_certificates

NEEDED = ("torch", "distributed", "cloudpickle", "safetensors", "pydantic", "ipykernel")
FOR_THE_SCREEN = ("jupyterlab", "anywidget")
EXTENSION = "etrain-jupyter"
WIDGET_SCRIPT = Path(__file__).parent / "static" / "widget.js"
GUIDE = "docs/troubleshooting.md"
MARKS = {"ok": "  ok ", "note": "note ", "wrong": "WRONG"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    state: str
    """``ok``, ``note`` (works, with less) or ``wrong``."""
    what: str
    remedy: str = ""
    """What to do; empty if nothing need be done."""
    topic: str = ""
    """The section of docs/troubleshooting.md that says more."""

    def __str__(self) -> str:
        line = f"{MARKS[self.state]} {self.what}"
        more = f" ({GUIDE}#{self.topic})" if self.topic and self.state != "ok" else ""
        return f"{line}\n      -> {self.remedy}{more}" if self.remedy else line


def examine(store: RunStore) -> list[Finding]:
    """Look at everything that a job needs here; a check that breaks is itself a finding."""
    checks: dict[str, Callable[[], list[Finding]]] = {
        "python": _check_python,
        "packages": _check_packages,
        "gpu": _check_gpus,
        "screen": _check_screen,
        "tls": _check_tls,
        "state-directory": lambda: [_check_folder("state directory", state_root(), "ETRAIN_STATE")],
        "run-store": lambda: [_check_run_store(store)],
        "clusters": _check_clusters,
    }
    findings = []
    for topic, check in checks.items():
        try:
            found = check()
        except Exception as exc:  # The doctor's own trouble must not hide the other findings.
            what, remedy = f"{type(exc).__name__}: {exc}", "see the guide"
            found = [Finding(state="wrong", what=what, remedy=remedy)]
        findings += [replace(finding, topic=topic) for finding in found]
    return findings


def _check_python() -> list[Finding]:
    what = f"etrain-jupyter {__version__}, Python {platform.python_version()}, {sys.platform}"
    if sys.platform != "linux":
        return [Finding(state="note", what=what, remedy="only Linux is tested")]
    return [Finding(state="ok", what=what)]


def _check_packages() -> list[Finding]:
    findings = []
    for name in NEEDED:
        version = version_of(name)
        state, remedy = ("ok", "") if version else ("wrong", f"pip install {name}")
        findings.append(Finding(state=state, what=f"{name} {version or 'missing'}", remedy=remedy))
    kernel = version_of("ipykernel")
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
    if shutil.which("nvidia-smi") and not torch_has_cuda():
        what = f"there is an NVIDIA driver, but torch {version_of('torch')} is built without CUDA"
        return [Finding(state="note", what=what, remedy="install a CUDA build, see pytorch.org")]
    gpus = finish_gpu_query(start_gpu_query(), timeout_s=5.0)
    if not gpus:
        cores = os.cpu_count() or 1
        return [Finding(state="ok", what=f"no GPU here: workers share {cores} CPU cores")]
    names = ", ".join(name for _, name in gpus)
    return [Finding(state="ok", what=f"{len(gpus)} GPU: {names}")]


def _check_screen() -> list[Finding]:
    findings = []
    for name in FOR_THE_SCREEN:
        version = version_of(name)
        state, remedy = ("ok", "") if version else ("note", f"pip install {name}")
        findings.append(Finding(state=state, what=f"{name} {version or 'missing'}", remedy=remedy))
    if not WIDGET_SCRIPT.is_file():
        remedy = "pip install a wheel, or build the front end: make lab"
        what = "the widget is not built: notebooks show tables"
        findings.append(Finding(state="wrong", what=what, remedy=remedy))
    found = find_extension()
    if found is None:
        remedy = "pip install --force-reinstall etrain-jupyter where JupyterLab runs"
        what = "JupyterLab's extension is not installed in this environment"
        findings.append(Finding(state="note", what=what, remedy=remedy))
    else:
        findings.append(Finding(state="ok", what=f"JupyterLab extension in {found}"))
    return findings


def _check_tls() -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path(folder) / "tls"
        write_certificates(certificates, mint_certificates("doctor"))
        read_security(certificates, "client").get_connection_args("client")
    return [Finding(state="ok", what=f"TLS on loopback ({ssl.OPENSSL_VERSION})")]


def _check_folder(what: str, folder: Path, variable: str) -> Finding:
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Finding(state="ok", what=f"{what} {folder}")
    remedy = f"make it writable, or set {variable} to a folder of yours"
    return Finding(state="wrong", what=f"{what} {folder} cannot be written", remedy=remedy)


def _check_run_store(store: RunStore) -> Finding:
    try:
        store.check_writable()
    except EtrainError as exc:
        return Finding(state="wrong", what=str(exc), remedy=f"set {ROOT_VARIABLE} to another place")
    copies = _check_folder(f"run store {store}, its copies in", store.root, "ETRAIN_STATE")
    is_folder = str(store) == str(store.root)
    return _check_folder("run store", store.root, ROOT_VARIABLE) if is_folder else copies


def _check_clusters() -> list[Finding]:
    findings = []
    for cluster in cluster_dirs():
        record = cluster.record()
        if record is None or not record.is_alive:
            what = f"cluster {cluster.cluster_id} has ended or is starting"
            findings.append(Finding(state="note", what=what, remedy="%etrain down clears it away"))
            continue
        link = link_to(cluster.address(record).to_dict())
        try:
            facts = link.call("etrain_describe", timeout=5.0) if link else {}
            what = f"cluster {cluster.cluster_id}: {facts.get('workers', 0)} workers, "
            findings.append(Finding(state="ok", what=f"{what}{facts.get('jobs', 0)} jobs"))
        except EtrainError as exc:
            what = f"cluster {cluster.cluster_id} does not answer ({exc})"
            findings.append(Finding(state="wrong", what=what, remedy="%etrain down ends it"))
        finally:
            if link is not None:
                link.release()
    return findings or [Finding(state="ok", what="no cluster is running")]


def version_of(name: str) -> str:
    """Return the installed version of a package without importing it; empty if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_extension() -> Path | None:
    """Return where JupyterLab finds our extension; None if it does not."""
    try:
        from jupyter_core.paths import jupyter_path
    except ImportError:
        return None
    folders = (Path(path) / EXTENSION for path in jupyter_path("labextensions"))
    return next((folder for folder in folders if (folder / "package.json").is_file()), None)
