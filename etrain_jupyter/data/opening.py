"""Find out the format of a data set, and index it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from etrain_jupyter.data.formats.arrow import index_arrow
from etrain_jupyter.data.formats.json_lines import index_json_lines
from etrain_jupyter.data.formats.own import MANIFEST, PROGRESS, index_own
from etrain_jupyter.data.formats.parquet import index_parquet
from etrain_jupyter.data.index import ShardFile, ShardIndex, check_index
from etrain_jupyter.data.places import FileFacts, Place
from etrain_jupyter.errors import ShardError

_SUFFIXES = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
}
_INDEXERS: dict[str, Callable[[Place, Sequence[ShardFile]], ShardIndex]] = {
    "parquet": index_parquet,
    "arrow": index_arrow,
    "json": index_json_lines,
}
_NAMES = {"parquet": "Parquet", "arrow": "Arrow", "json": "JSON lines"}


def index_place(place: Place, cache: Path | None) -> ShardIndex:
    """Index the data set at a place; ``cache`` is a folder for indices that take time to build.

    Raises:
        ShardError: If no data set is found, or it is incomplete, empty or inconsistent.
    """
    listed = place.list()
    if MANIFEST in listed:
        return check_index(index_own(place, listed), str(place))
    if PROGRESS in listed:
        raise ShardError(
            f"{place} is a set whose write has not finished: it has {PROGRESS} and no {MANIFEST}. "
            "It was not read. Run write_shards again with the same arguments to complete it."
        )
    kind, files = _files_of(place, listed)
    identity = [2, kind, str(place), [[file.name, *listed[file.name]] for file in files]]
    return check_index(_cached(cache, identity, lambda: _INDEXERS[kind](place, files)), str(place))


def _files_of(place: Place, listed: dict[str, FileFacts]) -> tuple[str, list[ShardFile]]:
    if "dataset_dict.json" in listed:
        splits = sorted({name.partition("/")[0] for name in listed if "/" in name})
        raise ShardError(
            f"{place} is a Hugging Face DatasetDict. Name one of its splits: "
            f"{', '.join(f'{place}/{split}' for split in splits)}."
        )
    if "state.json" in listed and "dataset_info.json" in listed:
        return "arrow", _files_of_hugging_face(place, listed)
    found: dict[str, list[ShardFile]] = {}
    for name, facts in sorted(listed.items()):
        # Skip _SUCCESS, _metadata, .crc and similar files, as other readers do: they are not data.
        if any(part.startswith(("_", ".")) for part in name.split("/")):
            continue
        kind = _SUFFIXES.get(Path(name).suffix.lower())
        if kind is not None:
            found.setdefault(kind, []).append(ShardFile(name, *facts))
    if len(found) > 1:
        kinds = " and ".join(_NAMES[kind] for kind in found)
        raise ShardError(f"{place} has {kinds} files. Keep one format in a folder.")
    if not found:
        raise ShardError(
            f"{place} has no shards ({len(listed)} files). Shards reads folders with "
            f"{', '.join(_SUFFIXES)} files, data sets saved by Hugging Face's save_to_disk, and "
            "sets written by write_shards."
        )
    return next(iter(found.items()))


def _files_of_hugging_face(place: Place, listed: dict[str, FileFacts]) -> list[ShardFile]:
    data = place.read("state.json", 0, listed["state.json"].size, version="", check=None)
    try:
        names = [str(entry["filename"]) for entry in json.loads(data)["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ShardError(f"state.json in {place} is invalid ({exc}).") from exc
    missing = [name for name in names if name not in listed]
    if missing:
        raise ShardError(
            f"shard {missing[0]} is missing in {place}: state.json names {len(names)} files. "
            "Nothing was skipped. Restore it, or save the data set again."
        )
    return [ShardFile(name, *listed[name]) for name in names]


def _cached(cache: Path | None, identity: list[Any], build: Callable[[], ShardIndex]) -> ShardIndex:
    # The ranks of a machine open the same set, and indexing JSON lines reads all files.
    if cache is None:
        return build()
    path = cache / f"index-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}"
    with suppress(OSError, ShardError):
        return ShardIndex.from_bytes(path.read_bytes())
    index = build()
    with suppress(OSError):  # a full disk costs the next rank some time
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(index.to_bytes())
        os.replace(partial, path)
    return index
