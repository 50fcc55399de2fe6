"""A checkpoint's weights as files for others: one safetensors file, or a ``transformers`` folder.

Neither needs torch: a safetensors file is a JSON header and the bytes of its tensors
(https://huggingface.co/docs/safetensors), so another header in front of the same bytes is all
that an export is. Files are written aside, synced and then given their names.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from etrain_jupyter.errors import CheckpointError, ConfigError
from etrain_jupyter.notebook.job.job_record import JobRecord
from etrain_jupyter.notebook.job.weights import MODEL_PART, Saved, differences, load_weights
from etrain_jupyter.storage.checkpoints.files import fsync_folder, link_if_absent, removed_at_end

FORMATS = ("safetensors", "transformers")
CONFIG_FILE = "config.json"
"""A part of the checkpoint of a ``transformers`` model, and what ``from_pretrained`` reads."""
COPY_BYTES = 4 << 20
ALIGNED_TO = 8
"""The tensors of a safetensors file begin at a multiple of this."""


def find_format(name: str, model: Any) -> str:
    """Return the format of that name.

    Raises:
        ConfigError: If there is none, or if it takes no ``model``.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"format={name!r}: there is no such format",
            hint=f"there are {' and '.join(FORMATS)}",
        )
    if model is not None and name != "transformers":
        raise ConfigError(
            f"format={name!r} takes no model: it writes the tensors alone",
            hint="leave model out, or write format='transformers'",
        )
    return name


def export_file(record: JobRecord, saved: Saved, path: Path, *, overwrite: bool) -> Path:
    """Write the weights to one safetensors file; its header tells the job and the step.

    Raises:
        ConfigError: If there is something of that name.
        CheckpointError: If it cannot be written.
    """
    target = path.expanduser().absolute()
    if target.is_dir():
        raise ConfigError(
            f"{target} is a folder; format='safetensors' writes one file",
            hint=f"write {path / 'model.safetensors'}, or format='transformers' for a folder",
        )
    check_absent(target, overwrite=overwrite)
    with explained(record, saved, target):
        put_file(target, lambda file: copy_weights(record, saved, file), overwrite=overwrite)
    return target


def export_folder(
    record: JobRecord, saved: Saved, path: Path, *, model: Any, overwrite: bool
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into a folder; other files there stay.

    Raises:
        ConfigError: If the folder has such files, or if there is no config.
        CheckpointError: If it cannot be written, or if ``model`` is another one than the job's.
    """
    folder = path.expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file; format='transformers' writes a folder", hint="name a folder"
        )
    config = config_text(record, saved, model)
    for name in (CONFIG_FILE, MODEL_PART):
        check_absent(folder / name, overwrite=overwrite)
    with explained(record, saved, folder):
        put_file(folder / CONFIG_FILE, lambda file: file.write(config), overwrite=overwrite)
        # Last: without its weights, a folder is opened by nobody.
        weights = folder / MODEL_PART
        put_file(weights, lambda file: copy_weights(record, saved, file), overwrite=overwrite)
    return folder


def config_text(record: JobRecord, saved: Saved, model: Any) -> bytes:
    """Return what ``config.json`` says: of ``model`` if it is given, else of the job's own one."""
    if model is None:
        if CONFIG_FILE in saved.files:
            return saved.files[CONFIG_FILE].read_bytes()
        raise ConfigError(
            f"the model of job {record.job_id}, {record.config.get('model', '')}, is no "
            "transformers model with a config of its own: its checkpoint has no config.json",
            hint="pass model=... with one that has the same weights, or write format='safetensors'",
        )
    from etrain_jupyter.trainer.state.model_config import config_of

    text = config_of(model)
    if text is None:
        raise ConfigError(
            f"model={type(model).__name__} is no transformers model with a config",
            hint="pass a PreTrainedModel, or write format='safetensors'",
        )
    if differs := differences(load_weights(saved), model.state_dict()):
        raise CheckpointError(
            f"the checkpoint of {record.job_id} does not fit {type(model).__name__}: "
            f"{'; '.join(differs)}. Nothing was written."
        )
    return text


def copy_weights(record: JobRecord, saved: Saved, file: IO[bytes]) -> None:
    """Copy the weights with a header that tells where they come from."""
    with saved.files[MODEL_PART].open("rb") as source:
        (length,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(length))
        told = header.get("__metadata__") or {}
        mine = {"format": "pt", "job_id": record.job_id, "step": str(saved.step)}
        text = json.dumps({**header, "__metadata__": told | mine}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNED_TO)
        file.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(source, file, COPY_BYTES)


# --- files that are whole or not there ---


def check_absent(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file that nobody said may be replaced."""
    if path.exists() and not overwrite:
        raise ConfigError(
            f"{path} exists and was left as it is",
            hint="write overwrite=True (--overwrite), or another path",
        )


def put_file(target: Path, write: Callable[[IO[bytes]], Any], *, overwrite: bool) -> None:
    """Write a file under a temporary name, sync it, and give it its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with removed_at_end(temporary):
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, target)
        elif not link_if_absent(temporary, target):
            check_absent(target, overwrite=False)  # somebody was faster
        fsync_folder(target.parent)


@contextmanager
def explained(record: JobRecord, saved: Saved, target: Path) -> Iterator[None]:
    """Turn the system's errors into ours, which name the place."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(
            f"step {saved.step} of job {record.job_id} cannot be written to {target}: "
            f"{exc.strerror or exc}. Half a file is never left."
        ) from exc
