"""Pack the records that ``eval.predict`` returns for a batch, and unpack them for ``eval.score``.

Tensors whose first dimension is samples are stored as they are and split into rows only when they
are unpacked, which takes less space than one tensor per sample.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import cloudpickle
import numpy as np
import torch

from etrain_jupyter.trainer.references import WorkloadError

_HOW = (
    "Return one record per sample: a list, or a tensor (or a tuple or dict of tensors) whose first "
    "dimension is samples."
)


def pack_records(returned: Any, samples: range) -> bytes:
    """Return the records of a batch as bytes; concatenated, such bytes can be unpacked.

    Args:
        returned: A list with one record per sample, or a tensor, a tuple or a dict of tensors
            whose first dimension is samples.
        samples: Positions of the batch's samples in data.eval.

    Raises:
        WorkloadError: If ``returned`` is something else, or has the wrong number of records.
    """
    kind, columns = _columns_of(returned)
    for name, column in columns.items():
        if len(column) != len(samples):
            where = f" in {name!r}" if kind == "dict" else ""
            raise WorkloadError(
                f"eval.predict returned {len(column)} records{where} for a batch of "
                f"{len(samples)} samples (positions {samples.start} to {samples.stop - 1} of "
                f"data.eval). {_HOW}"
            )
    # Pickle by value, because the notebook may define the class of the records.
    data: bytes = cloudpickle.dumps((kind, _to_host(columns)))
    return data


def unpack_all(file: BinaryIO, num_bytes: int) -> Iterator[Any]:
    """Yield the records in a file, from its current position."""
    end = file.tell() + num_bytes
    while file.tell() < end:
        kind, columns = pickle.load(file)
        if kind == "one":
            yield from columns[0]
            continue
        for row in zip(*columns.values(), strict=True):
            yield row if kind == "tuple" else dict(zip(columns, row, strict=True))


def _columns_of(returned: Any) -> tuple[str, dict[Any, Any]]:
    """Return how the records are stored (``one`` column, ``tuple`` or ``dict``), and the columns.

    Raises:
        WorkloadError: If ``returned`` is none of these.
    """
    if isinstance(returned, list):
        return "one", {0: returned}
    kind, columns = "one", {0: returned}
    if isinstance(returned, Mapping):
        kind, columns = "dict", dict(returned)
    elif isinstance(returned, tuple):
        kind, columns = "tuple", dict(enumerate(returned))
    is_table = columns and all(
        isinstance(value, torch.Tensor | np.ndarray) and value.ndim for value in columns.values()
    )
    if not is_table:
        raise WorkloadError(f"eval.predict returned a {type(returned).__name__}. {_HOW}")
    return kind, columns


def _to_host(value: Any) -> Any:
    """Copy the tensors of a nested record to host memory, each with its own elements only."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # A view would be pickled with the whole storage that it is a part of.
        is_view = value.untyped_storage().nbytes() != value.nbytes
        return value.clone() if is_view else value
    if type(value) is dict:
        return {key: _to_host(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_host(inner) for inner in value)
    return value
