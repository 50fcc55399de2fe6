"""Memory that one step frees is kept for the next step."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="platform: the allocator is not glibc's"
)

# A step in miniature: allocates eight blocks of 16 MiB, writes to them, and frees them.
STEPS = """
import json, resource, sys
import torch
from etrain_jupyter.trainer.main import keep_freed_memory

is_kept = sys.argv[1] == "kept" and keep_freed_memory()
def step():
    blocks = [torch.ones(4 << 20) for _ in range(8)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print(json.dumps([is_kept, (faults() - before) * resource.getpagesize() / 5 / 2**20]))
"""


def mib_per_step(choice: str, **environment: str) -> tuple[bool, float]:
    run = subprocess.run(
        [sys.executable, "-c", STEPS, choice],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    is_kept, mib = json.loads(run.stdout)
    return is_kept, mib


def test_repeated_steps_get_no_new_pages_from_the_kernel():
    # Whether glibc returns memory by default depends on what is at the end of its heap. With this
    # variable, it returns every block.
    _, returned = mib_per_step("default", MALLOC_MMAP_THRESHOLD_="131072")
    is_kept, kept = mib_per_step("kept")
    assert is_kept
    assert kept < 2 < returned


@pytest.mark.parametrize(
    "variable",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_thresholds_that_the_user_has_set_are_left_alone(variable):
    is_kept, _ = mib_per_step("kept", **variable)
    assert not is_kept
