"""Choose the backend that sums the gradients, NCCL or gloo, and explain NCCL's errors."""

from __future__ import annotations

from collections.abc import Sequence

AUTO, NCCL, GLOO = "auto", "nccl", "gloo"

MAX_MESSAGE_CHARS = 300
"""Maximum length of NCCL's message in a status; the log has the whole text."""

_UNKNOWN_REMEDY = "set NCCL_DEBUG=INFO in the workers' environment, and read NCCL's log there"

# Specific causes first, because many messages also contain a general word like "socket".
_REMEDIES = (
    (
        ("/dev/shm", "shared memory", "no space left on device"),  # Docker's default is 64 MB
        "give the container more shared memory (docker run --shm-size=1g), or set "
        "NCCL_SHM_DISABLE=1 in the workers' environment",
    ),
    (
        ("duplicate gpu", "invalid usage"),
        "give every rank a separate GPU: check CUDA_VISIBLE_DEVICES of the workers",
    ),
    (
        ("driver version", "cuda driver", "cudadriver"),
        "update the NVIDIA driver, or install the build of torch for the driver's CUDA version",
    ),
    (
        ("ibv_", "infiniband", "net/ib", "roce"),
        "set NCCL_IB_DISABLE=1 in the workers' environment, which uses TCP instead of InfiniBand",
    ),
    (
        ("nvls", "multicast"),
        "set NCCL_NVLS_ENABLE=0 in the workers' environment",
    ),
    (
        ("peer access", "peer mapping", "p2p", "cuipc", "cudaipc"),
        "set NCCL_P2P_DISABLE=1 in the workers' environment",
    ),
    (
        ("socket", "bootstrap", "interface", "connection refused", "timed out", "no route"),
        "set NCCL_SOCKET_IFNAME in the workers' environment to the network interface that "
        "connects the machines (ip addr lists them), and open its ports between them",
    ),
)
"""Substrings of NCCL's messages, in lower case, and the remedy; the first match applies."""


def choose_backend(devices: Sequence[tuple[str, str]]) -> str:
    """Return ``nccl`` if no two ranks share a GPU and none trains on a CPU, otherwise ``gloo``.

    Args:
        devices: For each rank, the device as torch names it and the GPU's identifier, empty if
            unknown.

    >>> choose_backend([("cuda:0", "GPU-1f"), ("cuda:0", "GPU-2e")])
    'nccl'
    >>> choose_backend([("cuda:0", "GPU-1f"), ("cuda:0", "GPU-1f")])
    'gloo'
    """
    # Compare identifiers: ``cuda:0`` is a different GPU on each machine, and perhaps in each
    # process.
    gpus = [gpu for device, gpu in devices if device.startswith("cuda") and gpu]
    return NCCL if devices and len(gpus) == len(set(gpus)) == len(devices) else GLOO


def why_no_nccl(devices: Sequence[tuple[str, str, str]]) -> str:
    """Explain why NCCL cannot connect these ranks; empty if it can.

    Args:
        devices: For each rank, its worker, and the device and GPU as in ``choose_backend``.

    >>> why_no_nccl([("w1", "cuda:0", "GPU-1f"), ("w2", "cpu", "")])
    'w2 trains on cpu'
    >>> why_no_nccl([("w1", "cuda:0", "GPU-1f"), ("w2", "cuda:0", "GPU-1f")])
    'w1 and w2 share one GPU (GPU-1f)'
    """
    owners: dict[str, str] = {}
    for worker, device, gpu in devices:
        if not device.startswith("cuda"):
            return f"{worker} trains on {device or 'an unknown device'}"
        if not gpu:
            return f"the GPU of {worker} has no identifier"
        if gpu in owners:
            return f"{owners[gpu]} and {worker} share one GPU ({gpu})"
        owners[gpu] = worker
    return ""


def shorten_message(text: str) -> str:
    r"""Shorten NCCL's message to the kind of error and its last lines.

    >>> shorten_message("NCCL error in: a.cpp:77, unhandled system error, NCCL version 2.27.3\n"
    ...     "ncclSystemError: System call failed.\nLast error:\nNo space left on device")
    'ncclSystemError: No space left on device'
    """
    # NCCL error in: a.cpp:77, unhandled system error ...     location in torch: no use to users
    # ncclSystemError: System call failed.                    the kind
    # Last error:
    # No space left on device                                 the cause
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kinds = [line.partition(":")[0] for line in lines if line.startswith("nccl") and ":" in line]
    last: list[str] = []
    if "Last error:" in lines:
        last = lines[lines.index("Last error:") + 1 :]
    short = f"{kinds[0]}: {' '.join(last)}" if kinds and last else " ".join(lines)
    return short if len(short) <= MAX_MESSAGE_CHARS else f"{short[: MAX_MESSAGE_CHARS - 3]}..."


def remedy_for(text: str) -> str:
    """Return the usual fix for an NCCL error with this message.

    >>> remedy_for("Bootstrap : no socket interface found").partition(" in ")[0]
    'set NCCL_SOCKET_IFNAME'
    """
    lower = text.lower()
    for words, remedy in _REMEDIES:
        if any(word in lower for word in words):
            return remedy
    return _UNKNOWN_REMEDY
