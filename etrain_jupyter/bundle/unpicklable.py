"""What of the notebook cannot be shipped, under which name, and what to do instead."""

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
"""How far inside a captured object the culprit is looked for."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_SHELLS = {"InteractiveShell", "ZMQInteractiveShell", "TerminalInteractiveShell"}
_ENCLOSED = "closure "
_BOOKKEEPING = {"__dict__", "__weakref__", "__builtins__", "__loader__", "__spec__"}
_DEFAULT_REMEDY = "Create it inside a function that runs on the worker, or leave it out."


@dataclass(frozen=True, kw_only=True)
class Unpicklable:
    """Why an object stays here."""

    what: str
    """What it is, with its article: ``an open file ('x.csv')``."""
    remedy: str = _DEFAULT_REMEDY


class RefusedError(Exception):
    """Ends pickling at an object that must not travel."""

    def __init__(self, refusal: Unpicklable) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


def refusal_of(value: Any) -> Unpicklable | None:
    """Return why ``value`` itself cannot travel, or None; what it holds is not looked at."""
    if isinstance(value, io.IOBase):
        return _refusal_of_file(value)
    if isinstance(value, socket.socket):
        return Unpicklable(what="an open socket", remedy="Connect where it is used, on the worker.")
    if isinstance(value, GeneratorType | CoroutineType | AsyncGeneratorType):
        remedy = "Name the function that makes it, or put what it yields into a list."
        return Unpicklable(
            what=f"a {type(value).__name__.replace('_', ' ')} that has begun", remedy=remedy
        )
    if isinstance(value, _LOCKS):
        return Unpicklable(
            what="a lock", remedy="Make it where it is used: ranks are processes of their own."
        )
    if type(value).__name__ in _SHELLS and hasattr(value, "user_ns"):
        return Unpicklable(
            what="the notebook's own shell", remedy="Code that trains must not use get_ipython()."
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _refusal_of_tensor(value)
    return None


def _refusal_of_file(value: io.IOBase) -> Unpicklable | None:
    if isinstance(value, io.BytesIO | io.StringIO) or is_standard_stream(value):
        return None
    name = getattr(value, "name", None)
    state = "a closed file" if value.closed else "an open file"
    shown = f" ({name!r})" if isinstance(name, str) else ""
    remedy = (
        "Open it where it is used, for example in __getitem__, or in a function that builds "
        "the data set."
    )
    return Unpicklable(what=state + shown, remedy=remedy)


def _refusal_of_tensor(value: Any) -> Unpicklable | None:
    device = str(value.device)
    if device.startswith(("cpu", "meta")):
        return None
    shape = tuple(value.shape)
    return Unpicklable(
        what=f"a tensor of shape {shape} on {device} of this machine",
        remedy="Ship .cpu() of it, or a function that builds it on the worker; the trainer moves "
        "it to its device.",
    )


def is_standard_stream(value: Any) -> bool:
    """Tell whether ``value`` is what ``print`` writes to, here often a stream of the notebook."""
    return any(value is s for s in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The innermost object that cannot travel, and the way to it."""

    story: str
    """``it is a lock``, ``'train_set.handle' is a lock`` or ``'log', which it uses, is a lock``."""
    remedy: str


def find_culprit(
    name: str,
    value: Any,
    failure: Exception,
    *,
    dump: Callable[[Any, set[int]], object],
    where: Callable[[str, Any], str],
) -> Culprit:
    """Follow what cannot be pickled inwards.

    Args:
        name: The captured name.
        value: Its object, which ``dump`` refused.
        failure: With what.
        dump: Pickles one object, passing over those whose ids it is given: they hold the object,
            and a way back to them (``super()`` in a method) is no fault of its own.
        where: Names the cell of a global, or returns an empty text.
    """
    path, used, cell = name, "", ""
    seen = {id(value)}
    for _ in range(MAX_DEPTH):
        # What is refused for what it is needs no look inside.
        part = _failing_part(value, dump, seen) if refusal_of(value) is None else None
        if part is None:
            break
        link, value, failure = part
        seen.add(id(value))
        if link.startswith((".", "[")):
            path += link
        else:
            verb = "encloses" if link.startswith(_ENCLOSED) else "uses"
            link = link.removeprefix(_ENCLOSED)
            used = f", which {'it' if path == name else path} {verb},"
            path, cell = link, where(link, value)
    refusal = failure.refusal if isinstance(failure, RefusedError) else None
    what = f"is {refusal.what}" if refusal else f"{_kind(value)} ({_reason(failure)})"
    subject = "it" if path == name else f"'{path}'"
    made = f", made in {cell}" if cell else ""
    story = f"{subject}{used} {what}{made}"
    return Culprit(story=story, remedy=refusal.remedy if refusal else _DEFAULT_REMEDY)


def _failing_part(
    value: Any, dump: Callable[[Any, set[int]], object], seen: set[int]
) -> tuple[str, Any, Exception] | None:
    for link, held in _parts_of(value):
        if id(held) in seen or held is None or isinstance(held, str | int | float | bytes):
            continue
        try:
            dump(held, seen)
        except Exception as exc:  # Whatever an object's own __reduce__ raises makes it the culprit.
            return link, held, exc
    return None


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object takes along: ``.attribute``, ``[item]``, a global or enclosed name."""
    function = getattr(value, "__func__", value)
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
        except ValueError:  # Not assigned yet.
            continue
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
