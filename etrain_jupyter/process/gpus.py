"""List the GPUs of this machine with ``nvidia-smi``, without importing torch."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

GPU_QUERY_S = 10.0
"""Timeout for ``nvidia-smi`` when a cluster starts. A cold driver takes a few seconds to load."""


def start_gpu_query() -> subprocess.Popen[str] | None:
    """Start listing the driver's GPUs without waiting; return None if torch cannot use any."""
    command = shutil.which("nvidia-smi")
    if command is None or not torch_has_cuda():
        return None
    return subprocess.Popen(
        [command, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def finish_gpu_query(
    query: subprocess.Popen[str] | None, *, timeout_s: float
) -> list[tuple[str, str]]:
    """Return identifier and name of each usable GPU; empty if the driver does not respond.

    If the driver hangs or fails, the cluster must still start: it falls back to CPU.
    """
    if query is None:
        return []
    try:
        text, _ = query.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        logger.warning("nvidia-smi did not answer within %g s: using CPU slots", timeout_s)
        query.kill()
        query.communicate()  # reap the process, and close its pipe
        return []
    return visible_gpus(parse_gpu_list(text), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpu_list(text: str) -> list[tuple[str, str]]:
    """Return identifier and name of each device listed by ``nvidia-smi -L``.

    A GPU partitioned with MIG is replaced by its MIG devices, because processes cannot use it as a
    whole.

    >>> parse_gpu_list("GPU 0: NVIDIA H200 (UUID: GPU-1f)")
    [('GPU-1f', 'NVIDIA H200')]
    """
    #     GPU 0: NVIDIA H200 (UUID: GPU-1f...)
    #       MIG 1g.18gb     Device  0: (UUID: MIG-2e...)
    #
    # One group per physical GPU: the GPU itself, followed by its MIG devices.
    groups: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        if found := re.match(r"GPU \d+: (.+) \(UUID: (\S+)\)", line):
            groups.append([(found[2], found[1])])
        elif groups and (found := re.match(r"\s+MIG (\S+)\s.*\(UUID: (\S+)\)", line)):
            name = groups[-1][0][1]
            groups[-1].append((found[2], f"{name} MIG {found[1]}"))
    return [device for whole, *mig_devices in groups for device in (mig_devices or [whole])]


def visible_gpus(gpus: Sequence[tuple[str, str]], visible: str | None) -> list[tuple[str, str]]:
    """Return the GPUs selected by ``CUDA_VISIBLE_DEVICES``, in its order.

    >>> visible_gpus([("GPU-1f", "A"), ("GPU-2e", "B")], "1")
    [('GPU-2e', 'B')]
    """
    if visible is None:
        return list(gpus)
    selected: list[tuple[str, str]] = []
    for item in filter(None, (part.strip() for part in visible.split(","))):
        if item.isdigit():
            matches = list(gpus[int(item) : int(item) + 1])
        else:
            # CUDA accepts a prefix of an identifier if it matches only one GPU.
            matches = [gpu for gpu in gpus if gpu[0].startswith(item)]
        if len(matches) != 1:
            # Like CUDA, ignore the first invalid entry and all entries after it.
            break
        selected += matches
    return selected


def torch_has_cuda() -> bool:
    """Return True if the installed torch was built for CUDA.

    Reads torch's version file, because an import would take seconds and hundreds of megabytes.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return True  # unknown: let nvidia-smi decide
    return re.search(r"^cuda\b.*=\s*None\s*$", text, re.MULTILINE) is None
