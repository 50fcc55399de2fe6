"""Files of a checkpoint: their names and formats.

A correct digest shows that a part has the bytes that its writer intended, but the writer may be
malicious. So parts are opened only as safetensors or JSON, which cannot run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import Manifest

MODEL_PART, OPTIMIZER_PART, EXTRA_PART, STATE_PART, CONFIG_PART = (
    "model.safetensors",
    "optimizer.safetensors",
    "extra.safetensors",
    "state.json",
    "config.json",
)

NEEDED = (MODEL_PART, OPTIMIZER_PART, STATE_PART)
"""Parts that are required to resume training. Loading only the weights requires fewer parts."""

AVERAGE = "ema"
"""Name of the averaged weights in the state."""

DIVIDED = "is_divided"
"""Key in ``state.json``. It is true if the optimizer's tensors are listed in the files of its state
instead of in ``state.json``, because each rank has written the tensors that it had."""

_SHARD = re.compile(r"optimizer-(\d{5})-of-(\d{5})\.safetensors")


def shard_name(number: int, num_shards: int) -> str:
    """Return the file name of one shard of the optimizer's state.

    >>> shard_name(0, 1), shard_name(1, 3)
    ('optimizer.safetensors', 'optimizer-00002-of-00003.safetensors')
    """
    if num_shards == 1:
        return OPTIMIZER_PART
    return f"optimizer-{number + 1:05d}-of-{num_shards:05d}.safetensors"


def optimizer_parts(names: Iterable[str]) -> list[str]:
    """Return the files of the optimizer's state: the complete set, even if some are missing."""
    # The name of any shard contains the number of shards.
    for name in names:
        if match := _SHARD.fullmatch(name):
            count = int(match[2])
            return [shard_name(number, count) for number in range(count)]
    return [OPTIMIZER_PART]


def weight_parts(names: Collection[str], *, has_average: bool) -> list[str]:
    """Return the files that contain the weights and their description.

    The optimizer's state is not among them. With Adam it is twice the size of the weights.

    Args:
        names: Files of the checkpoint.
        has_average: True to include the averaged weights.
    """
    wanted = (MODEL_PART, STATE_PART, CONFIG_PART, *((EXTRA_PART,) if has_average else ()))
    return [name for name in wanted if name in names]


def check_parts(
    manifest: Manifest,
    files: dict[str, Path],
    needed: Collection[str] = (MODEL_PART, STATE_PART),
) -> None:
    """Reject a checkpoint with a missing part or a part in the wrong format.

    Raises:
        CheckpointError: If a part is missing or malformed; the message names it.
    """
    shards = optimizer_parts(manifest.parts)
    for name in [n for n in needed if n != OPTIMIZER_PART]:
        if name not in files:
            raise CheckpointError(f"its manifest does not list {name}")
    for name in shards if OPTIMIZER_PART in needed else ():
        # A job with ``shard: optimizer`` does not open these files as a whole.
        if name not in manifest.parts:
            raise CheckpointError(f"its manifest does not list {name}")
    header_of(files)
    for name in (MODEL_PART, *shards, EXTRA_PART):
        if name not in files:
            continue
        # Reads and verifies only the header; the digest has already verified the bytes.
        try:
            with safe_open(files[name], framework="numpy"):
                pass
        except (SafetensorError, OSError) as exc:
            raise CheckpointError(
                f"{manifest.parts[name].key} is not a safetensors file, and is not opened in any "
                "other format"
            ) from exc


def has_average(files: dict[str, Path]) -> bool:
    """Return True if a checkpoint contains averaged weights.

    Raises:
        CheckpointError: As ``header_of``.
    """
    return EXTRA_PART in files and lists_average(files[STATE_PART])


def lists_average(state_file: Path) -> bool:
    """Return True if a ``state.json`` lists averaged weights, which are in the extra part.

    Raises:
        CheckpointError: As ``header_of``.
    """
    extras = header_of({STATE_PART: state_file}).get("extras")
    return isinstance(extras, dict) and AVERAGE in extras


def header_of(files: dict[str, Path]) -> dict[str, Any]:
    """Return the contents of ``state.json``.

    Raises:
        CheckpointError: If the file is not a JSON object.
    """
    try:
        header = json.loads(files[STATE_PART].read_bytes())
    except (ValueError, OSError, RecursionError) as exc:
        raise CheckpointError(f"its {STATE_PART} cannot be read") from exc
    if not isinstance(header, dict):
        raise CheckpointError(f"its {STATE_PART} is not a JSON object")
    return header


def config_of(model: Any) -> bytes | None:
    """Return the config that ``from_pretrained`` of a ``transformers`` model needs; otherwise None.

    ``architectures`` names the class of the model, as ``save_pretrained`` would write it.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained") or not hasattr(config, "to_json_string"):
        return None
    try:
        values = json.loads(config.to_json_string())
        values["architectures"] = [type(model).__name__]
        return json.dumps(values, indent=2, sort_keys=True).encode()
    except (TypeError, ValueError, AttributeError):
        return None  # JSON cannot represent this config; the weights are saved without it
