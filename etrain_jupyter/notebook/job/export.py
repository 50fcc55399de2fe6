"""Export a checkpoint's weights as a safetensors file or a ``transformers`` folder.

Neither format needs torch. A safetensors file is a JSON header followed by the bytes of its tensors
(https://huggingface.co/docs/safetensors), so an export replaces the header and copies the bytes.
Files are written under a temporary name, synced, and then renamed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from etrain_jupyter.errors import CheckpointError, ConfigError
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.weights import (
    MODEL_PART,
    Saved,
    differences,
    load_weights,
    uses_average,
)
from etrain_jupyter.storage.checkpoints.files import fsync_folder, link_if_absent, removed_at_end

FORMATS = ("safetensors", "transformers")
CONFIG_FILE = "config.json"
"""The checkpoint part with the config of a ``transformers`` model; ``from_pretrained`` reads it."""
COPY_BYTES = 4 << 20
ALIGNED_TO = 8
"""Alignment of the tensor data in a safetensors file, in bytes."""


def find_format(name: str, model: Any) -> str:
    """Check the name of a format and return it.

    Raises:
        ConfigError: If the format does not exist, or does not accept ``model``.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"format={name!r} is not supported",
            hint=f"use {' or '.join(map(repr, FORMATS))}",
        )
    if model is not None and name != "transformers":
        raise ConfigError(
            f"format={name!r} does not use model: it writes only the tensors",
            hint="leave out model, or use format='transformers'",
        )
    return name


@contextmanager
def export_source(saved: Saved, weights: str) -> Iterator[Saved]:
    """Yield the checkpoint to export: with averaged weights, if ``weights`` selects them.

    Raises:
        ConfigError, CheckpointError: As in ``uses_average``.
    """
    if not uses_average(saved, weights):
        yield saved
        return
    from etrain_jupyter.trainer.state.weight_average import write_averaged_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / MODEL_PART
        write_averaged_file(saved.files, file)
        yield replace(saved, files={**saved.files, MODEL_PART: file})


def export_file(record: RunRecord, saved: Saved, path: Path, *, overwrite: bool) -> Path:
    """Write the weights to one safetensors file, with the job and the step in its header.

    Raises:
        ConfigError: If the path is a folder, or exists and must not be overwritten.
        CheckpointError: If the file cannot be written.
    """
    target = path.expanduser().absolute()
    if target.is_dir():
        raise ConfigError(
            f"{target} is a folder; format='safetensors' writes one file",
            hint=f"use {path / 'model.safetensors'}, or format='transformers' for a folder",
        )
    check_absent(target, overwrite=overwrite)
    with as_checkpoint_error(record, saved, target):
        put_file(target, lambda file: copy_weights(record, saved, file), overwrite=overwrite)
    return target


def export_folder(
    record: RunRecord, saved: Saved, path: Path, *, model: Any, overwrite: bool
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into a folder; other files are kept.

    Raises:
        ConfigError: If the folder already has these files, or the model has no config.
        CheckpointError: If the folder is not writable, or ``model`` does not fit the weights.
    """
    folder = path.expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file; format='transformers' writes a folder", hint="pass a folder"
        )
    config = config_text(record, saved, model)
    for name in (CONFIG_FILE, MODEL_PART):
        check_absent(folder / name, overwrite=overwrite)
    with as_checkpoint_error(record, saved, folder):
        put_file(folder / CONFIG_FILE, lambda file: file.write(config), overwrite=overwrite)
        # Write the weights last. No library opens a folder without weights, so an incomplete export
        # is never loaded.
        weights = folder / MODEL_PART
        put_file(weights, lambda file: copy_weights(record, saved, file), overwrite=overwrite)
    return folder


def config_text(record: RunRecord, saved: Saved, model: Any) -> bytes:
    """Return the contents of ``config.json`` for ``model``; by default, for the job's model."""
    with saved.files[MODEL_PART].open("rb") as source:
        # peft keeps the pretrained model in the attribute base_model. Without the adapters' own
        # config, from_pretrained would find none of its weights and initialize them randomly.
        wrapped = next((name for name in read_header(source) if name.startswith("base_model.")), "")
    if wrapped:
        raise ConfigError(
            f"job {record.job_id} trained a peft model (tensor {wrapped}), and "
            "format='transformers' does not write adapters. Nothing was written",
            hint="job.load_into(build()).save_pretrained(folder) writes the adapters, where "
            "build() returns the peft model of the job; to write the whole model, put "
            ".merge_and_unload() in front of .save_pretrained",
        )
    if model is None:
        if CONFIG_FILE in saved.files:
            return saved.files[CONFIG_FILE].read_bytes()
        raise ConfigError(
            f"the model of job {record.job_id}, {record.config.get('model', '')}, is not a "
            "transformers model with a config: its checkpoint has no config.json",
            hint="pass model= with a transformers model that has the same weights, or use "
            "format='safetensors'",
        )
    from etrain_jupyter.trainer.state.parts import config_of

    text = config_of(model)
    if text is None:
        raise ConfigError(
            f"model={type(model).__name__} is not a transformers model with a config",
            hint="pass a PreTrainedModel, or write format='safetensors'",
        )
    if differs := differences(load_weights(saved, "raw"), model.state_dict()):
        raise CheckpointError(
            f"the checkpoint of {record.job_id} does not fit {type(model).__name__}: "
            f"{'; '.join(differs)}. Nothing was written."
        )
    return text


def read_header(file: IO[bytes]) -> dict[str, Any]:
    """Return the header of a safetensors file, and leave the file at the tensor data."""
    # | header length: 8 bytes, little-endian | header: JSON | tensor data |
    (length,) = struct.unpack("<Q", file.read(8))
    header: dict[str, Any] = json.loads(file.read(length))
    return header


def copy_weights(record: RunRecord, saved: Saved, file: IO[bytes]) -> None:
    """Copy the weights with a header that names the job and the step."""
    # Tensor offsets count from the start of the data, so a header of a different length does not
    # change them.
    with saved.files[MODEL_PART].open("rb") as source:
        header = read_header(source)
        previous = header.get("__metadata__") or {}
        added = {"format": "pt", "job_id": record.job_id, "step": str(saved.step)}
        text = json.dumps(
            {**header, "__metadata__": previous | added}, separators=(",", ":")
        ).encode()
        # Pad the header so that the tensor data stay aligned.
        text += b" " * (-len(text) % ALIGNED_TO)
        file.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(source, file, COPY_BYTES)


# --- atomic files ---


def check_absent(path: Path, *, overwrite: bool) -> None:
    """Raise an error if the file exists, unless ``overwrite`` is set."""
    if path.exists() and not overwrite:
        raise ConfigError(
            f"{path} already exists and was not changed",
            hint="pass overwrite=True (--overwrite), or another path",
        )


def put_file(target: Path, write: Callable[[IO[bytes]], Any], *, overwrite: bool) -> None:
    """Write a file under a temporary name, sync it and rename it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Write into the same folder, because renames and links cannot cross file systems.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with removed_at_end(temporary):
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, target)
        elif not link_if_absent(temporary, target):
            # The caller has checked that the file does not exist, but another process may have
            # created it since. Unlike a rename, a link does not replace an existing file.
            check_absent(target, overwrite=False)
        fsync_folder(target.parent)


@contextmanager
def as_checkpoint_error(record: RunRecord, saved: Saved, target: Path) -> Iterator[None]:
    """Convert operating system errors to ``CheckpointError`` with the path."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(
            f"step {saved.step} of job {record.job_id} cannot be written to {target}: "
            f"{exc.strerror or exc}. No partial file was left."
        ) from exc
