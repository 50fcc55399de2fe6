"""Store the tensors of a bundle: only the elements of each view, with shared memory preserved.

torch pickles the whole storage of each tensor. This module pickles a tensor as a reference to its
storage. After all objects have been pickled, it selects the bytes of each storage that are needed:

============================  =================================================================
tensors of one storage        stored bytes
============================  =================================================================
disjoint ranges               each range, once
ranges that overlap or touch  their union, once: the tensors share memory on the rank too
sparse columns of a table     the elements of each column, if no two tensors share an element
============================  =================================================================

Never imports torch: if there is a tensor, torch is already imported.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.errors import BundleError

ALIGNMENT = 64
"""Alignment of each range in its storage and in the file, in bytes.

With the same alignment in both, a tensor on the rank is aligned as it was in the notebook.
"""

Spec = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
"""A view: storage, first byte, shape, strides in elements, bytes per element."""


@dataclass(frozen=True, kw_only=True)
class _View:
    spec: Spec
    owner: str
    """The first captured name that contains it."""
    number: int
    """Index among the views of its storage, in the order of pickling."""

    @property
    def start(self) -> int:
        return self.spec[1]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.spec[2]) * self.spec[4]

    @property
    def stop(self) -> int:
        """The end of its last element in the storage."""
        _, start, shape, strides, itemsize = self.spec
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        return start + (last + 1) * itemsize


@dataclass(kw_only=True)
class TensorTable:
    """Positions of the tensors' elements in a bundle, from the start of the payload."""

    ranges: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """By storage: first byte, end, and position, in ascending order."""
    packed: dict[Spec, int] = field(default_factory=dict)
    """Positions of sparse views, whose elements are stored densely."""


class TensorRecorder:
    """Record the tensors that a pickler visits, and select the bytes to store."""

    def __init__(self) -> None:
        self.owner = ""
        """The captured name that is being pickled."""
        self.sizes: dict[str, int] = defaultdict(int)
        """Bytes that each captured name added; set by ``collect``."""
        self._keys: dict[tuple[int, int], int] = {}
        self._storages: list[Any] = []
        self._views: list[dict[Spec, _View]] = []

    def reduce(self, tensor: Any) -> tuple[Any, ...]:
        """Return torch's own reduction of a tensor, with a reference instead of the storage."""
        torch = sys.modules["torch"]
        plain = torch._utils._rebuild_tensor_v2
        reduced: tuple[Any, ...] = tensor.__reduce_ex__(4)
        function, args = reduced[:2]
        if function is plain and _is_in_memory(args[0]):
            return rebuild_tensor, self._record(*args)
        # A subclass of Tensor, or a tensor with extra attributes: its reduction contains the plain
        # one, whose storage is replaced in the same way.
        is_typed = function is torch._tensor._rebuild_from_type_v2
        if is_typed and args[0] is plain and _is_in_memory(args[2][0]):
            return function, (rebuild_tensor, args[1], self._record(*args[2]), *args[3:])
        return reduced  # sparse or quantized (contains other tensors), or without data

    def _record(
        self, storage: Any, offset: int, shape: Any, strides: Any, *rest: Any
    ) -> tuple[Any, ...]:
        dtype, memory = storage.dtype, storage._untyped_storage
        shape, strides = tuple(shape), tuple(strides)
        # An empty tensor has no elements, and its storage may have no address. Key -1 stands for
        # an empty storage.
        if not math.prod(shape):
            return dtype, -1, 0, shape, strides, *rest
        # Identify a storage by its memory: ``from_numpy`` creates a new storage on each call.
        place = (memory.data_ptr(), memory.nbytes())
        key = self._keys.setdefault(place, len(self._storages))
        if key == len(self._storages):
            self._storages.append(memory)
            self._views.append({})
        # Count in bytes: views of different types may share one storage.
        spec = (key, offset * dtype.itemsize, shape, strides, dtype.itemsize)
        views = self._views[key]
        if spec not in views:
            views[spec] = _View(spec=spec, owner=self.owner, number=len(views))
        return dtype, key, offset, shape, strides, *rest

    def collect(self, position: int) -> tuple[TensorTable, list[tuple[int, memoryview]]]:
        """Assign positions to all recorded views, starting at ``position``.

        Returns:
            The table, and the bytes to store with their positions. The bytes are the notebook's
            own memory, except for copies of sparse columns.
        """
        table = TensorTable()
        pieces: list[tuple[int, memoryview]] = []
        for key, views in enumerate(self._views):
            memory = self._storages[key]
            ranges: list[tuple[int, int, int]] = []
            for group in _groups(list(views.values())):
                # Views are sorted by start, so the first one starts the range.
                start = group[0].start // ALIGNMENT * ALIGNMENT
                stop = max(view.stop for view in group)
                # Views that are stored separately no longer share memory, so this is possible only
                # if no two views share an element.
                if _are_sparse(group, start, stop):
                    for view in group:
                        data = _elements(memory, view)
                        position = align(position)
                        table.packed[view.spec] = position
                        self.sizes[view.owner] += len(data)
                        pieces.append((position, data))
                        position += len(data)
                    continue
                position = align(position)
                ranges.append((start, stop, position))
                pieces.append((position, _range(memory, start, stop)))
                position += stop - start
                self._count(group)
            # `ranges` stays empty if all groups were packed. The reader never needs it in this
            # case.
            if ranges:
                table.ranges[key] = ranges
        return table, pieces

    def _count(self, group: list[_View]) -> None:
        """Attribute the bytes of a range to the views' owners, each byte to the first view only."""
        covered: list[tuple[int, int]] = []
        for view in sorted(group, key=lambda view: view.number):
            self.sizes[view.owner] += _cover(covered, view.start, view.stop)


def align(position: int) -> int:
    """Round a position up to the next multiple of ``ALIGNMENT``."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def rebuild_tensor(*_: Any) -> Any:
    """Placeholder in pickles for ``TensorReader.rebuild``, which the unpickler calls instead.

    Do not move or rename it: bundles refer to it by name.
    """
    raise BundleError("a tensor of a bundle can only be read by open_bundle().")


class TensorReader:
    """Rebuild a bundle's tensors on top of its writable bytes, which they keep alive."""

    def __init__(self, payload: memoryview, table: TensorTable) -> None:
        self._payload = payload
        self._table = table
        self._starts = {key: [r[0] for r in ranges] for key, ranges in table.ranges.items()}
        self._memories: dict[int, Any] = {}
        """Storages by position."""

    def rebuild(
        self, dtype: Any, key: int, offset: int, shape: Any, strides: Any, *rest: Any
    ) -> Any:
        """Return one tensor. torch is already imported, because ``dtype`` has been unpickled."""
        itemsize = dtype.itemsize
        start, first = 0, offset * itemsize
        spec = (key, first, tuple(shape), tuple(strides), itemsize)
        if key < 0:
            memory = sys.modules["torch"].UntypedStorage(0)
        elif (position := self._table.packed.get(spec)) is not None:
            # Stored densely: the strides of the notebook no longer apply.
            memory = self._storage(position, math.prod(shape) * itemsize)
            start, strides = first, _dense_strides(shape)
        else:
            # The last range that starts at or before the tensor contains it.
            number = bisect.bisect_right(self._starts[key], first) - 1
            start, stop, position = self._table.ranges[key][number]
            memory = self._storage(position, stop - start)
        torch = sys.modules["torch"]
        storage = torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)
        offset_in_range = (first - start) // itemsize
        return torch._utils._rebuild_tensor_v2(storage, offset_in_range, shape, strides, *rest)

    def _storage(self, position: int, num_bytes: int) -> Any:
        # One storage per position: tensors that shared memory in the notebook share it here, too.
        if position not in self._memories:
            torch = sys.modules["torch"]
            data = self._payload[position : position + num_bytes]
            self._memories[position] = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        return self._memories[position]


def _is_in_memory(storage: Any) -> bool:
    memory = getattr(storage, "_untyped_storage", None)
    return memory is not None and str(memory.device) == "cpu"


def _groups(views: list[_View]) -> Iterator[list[_View]]:
    """Group the views whose ranges overlap or touch, in ascending order."""
    group: list[_View] = []
    stop = -1
    for view in sorted(views, key=lambda view: (view.start, view.stop)):
        # Ranges start at aligned positions. Two ranges within one alignment unit would store the
        # bytes between them twice, so they belong to one group.
        if group and view.start // ALIGNMENT * ALIGNMENT > stop:
            yield group
            group = []
        group.append(view)
        # If the group has a single view, it is new, and `stop` still belongs to the previous group.
        stop = max(stop, view.stop) if len(group) > 1 else view.stop
    if group:
        yield group


def _are_sparse(group: list[_View], start: int, stop: int) -> bool:
    """Return True if views use at most half of a range and no two share an element."""
    needed = sum(view.num_bytes for view in group)
    # The bit map costs time and memory. Build it only if at least half of the bytes are saved.
    if 2 * needed > stop - start:
        return False
    # Mark every element in a bit map of the range. If the marked bytes equal the sum of the views'
    # sizes, no element was marked twice. To save memory, each bit represents the largest unit
    # that divides all element sizes and positions.
    unit = math.gcd(*(view.spec[4] for view in group), *(view.start for view in group), start)
    torch = sys.modules["torch"]
    marks = torch.zeros((stop - start) // unit, dtype=torch.bool)
    for view in group:
        _, first, shape, strides, itemsize = view.spec
        width = itemsize // unit
        try:
            marks.as_strided(
                (*shape, width), (*(step * width for step in strides), 1), (first - start) // unit
            ).fill_(True)
        except RuntimeError:  # the view overlaps itself, as after expand()
            return False
    return int(marks.sum()) * unit == needed


def _elements(memory: Any, view: _View) -> memoryview:
    """Return a dense copy of the elements of a view, in index order."""
    torch = sys.modules["torch"]
    _, first, shape, strides, itemsize = view.spec
    whole = torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),), (1,))
    byte_strides = (*(step * itemsize for step in strides), 1)
    own = whole.as_strided((*shape, itemsize), byte_strides, first).contiguous()
    return memoryview(own.reshape(-1).numpy())


def _range(memory: Any, start: int, stop: int) -> memoryview:
    torch = sys.modules["torch"]
    part = torch.empty(0, dtype=torch.uint8).set_(memory, start, (stop - start,), (1,))
    return memoryview(part.numpy())


def _dense_strides(shape: Any) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _cover(covered: list[tuple[int, int]], start: int, stop: int) -> int:
    """Merge a range into sorted disjoint ranges; return the number of bytes that it adds."""
    # covered[first:last] are the ranges that overlap or touch the new one; they become one range.
    first = bisect.bisect_left(covered, start, key=lambda r: r[1])
    last = bisect.bisect_right(covered, stop, key=lambda r: r[0])
    touched = covered[first:last]
    begin = min([start, *(r[0] for r in touched[:1])])
    end = max([stop, *(r[1] for r in touched[-1:])])
    covered[first:last] = [(begin, end)]
    return end - begin - sum(b - a for a, b in touched)
