"""Find the object that cannot be pickled, its name in the notebook, and a remedy."""

from __future__ import annotations

import functools
import io
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, ModuleType
from typing import Any

MAX_DEPTH = 6
"""Maximum depth of the search inside a captured object."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_SHELLS = {"InteractiveShell", "ZMQInteractiveShell", "TerminalInteractiveShell"}
_ENCLOSED = "closure "
"""Prefix of a link to a closure variable. It contains a space, so no global name starts with it."""
_BOOKKEEPING = {"__dict__", "__weakref__", "__builtins__", "__loader__", "__spec__"}
_DEFAULT_REMEDY = "Create it inside a function that runs on the worker, or leave it out."


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Reason why an object must not be sent to the workers."""

    what: str
    """Description with its article: ``an open file ('x.csv')``."""
    remedy: str = _DEFAULT_REMEDY


class RefusedError(Exception):
    """Abort pickling at an object that must not be sent."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


def refusal_of(value: Any) -> Refusal | None:
    """Return why ``value`` itself must not be sent, or None. Does not check its attributes."""
    if isinstance(value, io.IOBase):
        return _refusal_of_file(value)
    if isinstance(value, socket.socket):
        return Refusal(what="an open socket", remedy="Connect on the worker, where it is used.")
    if isinstance(value, GeneratorType | CoroutineType | AsyncGeneratorType):
        return Refusal(
            what=f"a running {type(value).__name__.replace('_', ' ')}",
            remedy="Pass the function that creates it, or collect its values in a list.",
        )
    if isinstance(value, _LOCKS):
        return Refusal(
            what="a lock", remedy="Create it where it is used: each rank is a separate process."
        )
    # Pickling the shell would send the user's whole history, including outputs.
    if type(value).__name__ in _SHELLS and hasattr(value, "user_ns"):
        return Refusal(
            what="the notebook's IPython shell",
            remedy="Training code must not use get_ipython().",
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _refusal_of_tensor(value)
    return None


def _refusal_of_file(value: io.IOBase) -> Refusal | None:
    # Buffers in memory can be pickled; the pickler replaces standard streams.
    if isinstance(value, io.BytesIO | io.StringIO) or is_standard_stream(value):
        return None
    name = getattr(value, "name", None)
    state = "a closed file" if value.closed else "an open file"
    shown = f" ({name!r})" if isinstance(name, str) else ""
    remedy = (
        "Open it where it is used, for example in __getitem__, or in a function that builds "
        "the data set."
    )
    return Refusal(what=state + shown, remedy=remedy)


def _refusal_of_tensor(value: Any) -> Refusal | None:
    device = str(value.device)
    if device.startswith(("cpu", "meta")):
        return None
    shape = tuple(value.shape)
    return Refusal(
        what=f"a tensor of shape {shape} on {device} of this machine",
        remedy="Pass a copy made with .cpu(), or a function that builds it on the worker. The "
        "trainer moves it to its own device.",
    )


def refusal_of_dataset(num_bytes: int, limit: int) -> Refusal:
    """Return the refusal of a Hugging Face ``Dataset`` that is too large to be sent."""
    return Refusal(
        what=f"a Hugging Face Dataset of {num_bytes / 2**20:,.0f} MB, of which at most "
        f"{limit / 2**20:,.0f} MB can be sent",
        remedy="Pass a function that loads it on the worker, for example with load_from_disk; or "
        "write it once with write_shards(dataset, to=...) and train on Shards(...).",
    )


def is_standard_stream(value: Any) -> bool:
    """Return True for stdout and stderr, which are often streams of the notebook."""
    return any(value is s for s in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


@dataclass(frozen=True, kw_only=True)
class UnpicklablePart:
    """The innermost object that cannot be pickled, and the path to it."""

    explanation: str
    """``it is a lock``, ``'train_set.handle' is a lock`` or ``'log', which it uses, is a lock``."""
    remedy: str


def find_unpicklable(
    name: str,
    value: Any,
    failure: Exception,
    *,
    dump: Callable[[Any, set[int]], object],
    where: Callable[[str, Any], str],
) -> UnpicklablePart:
    """Trace a pickling failure from a captured object to the part that causes it.

    Example, for a class whose method prints to an open file::

        Net  ->  .forward  ->  log (a global)      "'log', which Net.forward uses, is an open file"

    Args:
        name: The captured name.
        value: Its object, which ``dump`` refused.
        failure: The exception that ``dump`` raised.
        dump: Pickles one object and skips the objects with the given ids. These are the holders
            of the object: a reference back to one of them (``super()`` in a method) would fail as
            well.
        where: Returns the cell that defines a global name; empty if unknown.
    """
    # Each iteration follows one link of the path in the example: `value` is the innermost object so
    # far that cannot be pickled, and `failure` is the exception raised by pickling it.
    path, used, cell = name, "", ""
    seen = {id(value)}
    for _ in range(MAX_DEPTH):
        # A refused object is the cause itself; do not search inside it.
        part = _failing_part(value, dump, seen) if refusal_of(value) is None else None
        if part is None:
            break
        link, value, failure = part
        seen.add(id(value))
        if link.startswith((".", "[")):
            path += link
        else:
            # A global or closure variable starts a new path: the user finds it by its own name,
            # in the cell that defines it.
            verb = "encloses" if link.startswith(_ENCLOSED) else "uses"
            link = link.removeprefix(_ENCLOSED)
            used = f", which {'it' if path == name else path} {verb},"
            path, cell = link, where(link, value)
    refusal = failure.refusal if isinstance(failure, RefusedError) else None
    what = f"is {refusal.what}" if refusal else f"{_kind(value)} ({_reason(failure)})"
    subject = "it" if path == name else f"'{path}'"
    defined = f", defined in {cell}" if cell else ""
    return UnpicklablePart(
        explanation=f"{subject}{used} {what}{defined}",
        remedy=refusal.remedy if refusal else _DEFAULT_REMEDY,
    )


def _failing_part(
    value: Any, dump: Callable[[Any, set[int]], object], seen: set[int]
) -> tuple[str, Any, Exception] | None:
    # Try the parts one by one: the first one that fails on its own is the cause. If all succeed,
    # the object itself is the cause (for example, its __reduce__ raises).
    for link, held in _parts_of(value):
        # Skip objects already on the path, and constants, which can always be pickled.
        if id(held) in seen or held is None or isinstance(held, str | int | float | bytes):
            continue
        try:
            dump(held, seen)
        except Exception as exc:  # An object's own __reduce__ may raise anything.
            return link, held, exc
    return None


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to: ``.attribute``, ``[item]``, a global or closure variable."""
    function = getattr(value, "__func__", value)  # of a bound method
    if isinstance(function, FunctionType):
        yield from _names_of(function)
        if function is not value:
            yield ".__self__", getattr(value, "__self__", None)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, tuple | list | set | frozenset):
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif isinstance(value, property):
        yield from ((f".{n}", getattr(value, n)) for n in ("fget", "fset", "fdel"))
    elif isinstance(value, type):
        yield from _attributes_of(value)
    elif isinstance(value, functools.partial):
        yield from ((f".{n}", getattr(value, n)) for n in ("func", "args", "keywords"))
    else:
        yield from _attributes_of(value)
        if not isinstance(value, ModuleType):
            yield ".__class__", type(value)


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    for name, held in getattr(value, "__dict__", {}).items():
        if name not in _BOOKKEEPING:
            yield f".{name}", held


def _names_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{_ENCLOSED}{free}", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    # The list grows while it is iterated: nested functions use globals too.
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, type(code))]
        for used in code.co_names:
            held = function.__globals__.get(used)
            if used in function.__globals__ and not isinstance(held, ModuleType):
                yield used, held
    yield from (
        (f".{n}", getattr(function, n)) for n in ("__defaults__", "__kwdefaults__", "__dict__")
    )


def _kind(value: Any) -> str:
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"is of type {name}, which cannot be pickled"


def _reason(exc: Exception) -> str:
    first = str(exc).strip().splitlines()[:1]
    return f"{type(exc).__name__}: {first[0]}" if first else type(exc).__name__
