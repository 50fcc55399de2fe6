"""When the ranks may talk through NCCL."""

from __future__ import annotations

import pytest

from etrain_jupyter.rules.membership.backend import choose_backend


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([("cuda:0", "GPU-a"), ("cuda:0", "GPU-b")], "nccl"),
        ([("cuda", "GPU-a")], "nccl"),
        ([("cuda:0", "GPU-a"), ("cuda:0", "GPU-a")], "gloo"),
        ([("cuda:0", "GPU-a"), ("cuda:1", "")], "gloo"),
        ([("cuda:0", "GPU-a"), ("cpu", "")], "gloo"),
        ([("cpu", ""), ("cpu", "")], "gloo"),
        ([("cpu", "GPU-a")], "gloo"),
        ([], "gloo"),
    ],
)
def test_nccl_requires_a_separate_gpu_for_every_rank(devices, expected):
    assert choose_backend(devices) == expected
