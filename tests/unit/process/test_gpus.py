"""GPU discovery, with shell scripts in place of ``nvidia-smi``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from etrain_jupyter.process import gpus as gpus_module
from etrain_jupyter.process.gpus import (
    finish_gpu_query,
    parse_gpu_list,
    start_gpu_query,
    torch_has_cuda,
    visible_gpus,
)


def test_mig_devices_replace_their_gpu_in_the_list() -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-b0)\n"
        "  MIG 1g.5gb      Device  1: (UUID: MIG-b1)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-cc)\n"
    )

    assert parse_gpu_list(text) == [
        ("MIG-b0", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
        ("MIG-b1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
        ("GPU-cc", "NVIDIA H200"),
    ]
    assert parse_gpu_list("No devices were found\n") == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aa", "GPU-bb"]),
        ("", []),
        ("1,0", ["GPU-bb", "GPU-aa"]),
        ("GPU-b", ["GPU-bb"]),
        ("0,7,1", ["GPU-aa"]),
        ("-1", []),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(visible: str | None, expected: list[str]) -> None:
    gpus = [("GPU-aa", "A"), ("GPU-bb", "B")]

    assert [uuid for uuid, _ in visible_gpus(gpus, visible)] == expected


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put an ``nvidia-smi`` that runs these shell commands first on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus_module, "torch_has_cuda", lambda: True)

    def write(commands: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


def test_gpus_are_listed_by_nvidia_smi(driver: Callable[[str], None]) -> None:
    driver('echo "GPU 0: NVIDIA H200 (UUID: GPU-1f)"')

    assert finish_gpu_query(start_gpu_query(), timeout_s=5.0) == [("GPU-1f", "NVIDIA H200")]


@pytest.mark.parametrize("commands", ["exec sleep 60", "echo it has failed; exit 9"])
def test_driver_that_hangs_or_fails_means_no_gpus(
    driver: Callable[[str], None], commands: str
) -> None:
    driver(commands)

    assert finish_gpu_query(start_gpu_query(), timeout_s=0.3) == []


def test_torch_without_cuda_means_no_gpus(
    driver: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("exit 0")
    monkeypatch.setattr(gpus_module, "torch_has_cuda", lambda: False)

    assert finish_gpu_query(start_gpu_query(), timeout_s=0.3) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = None", False),
        ("cuda: Optional[str] = '12.8'", True),
        ("cuda = None", False),
    ],
)
def test_cuda_support_of_torch_is_read_without_importing_it(
    line: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\n{line}\nhip = None\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)

    assert torch_has_cuda() is expected
