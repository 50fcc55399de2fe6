"""Encode messages as plain dicts; decode and check messages from a peer.

A message on the wire is one dict of plain values, ``{"kind": "JoinGeneration", ...}``, because our
processes exchange only msgpack (see ``process.peers``). Data from a peer is checked once, in this
module. Afterwards, the dataclass's types can be trusted.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from etrain_jupyter.log import events

KIND = "kind"
"""Key for the name of a message's class."""

VERSION = "wire_version"
"""Field in each message that opens a connection."""

MAX_KNOWN = 16
"""Maximum number of field-name sequences cached as valid, for each kind of record."""

Encoded = dict[str, Any]
"""A message as one dict of plain values. If it is from a peer, its fields may be invalid."""

Decode = Callable[[Any, str], Any]
"""Returns a checked value. The second argument is the value's path, for error messages."""

M = TypeVar("M")


class MalformedMessageError(ValueError):
    """A peer sent data that is not one of our messages."""


class WireVersionError(MalformedMessageError):
    """A peer uses another wire version.

    Attributes:
        theirs: The peer's version; ``unknown`` if it sent none.
        ours: The version of this process.
    """

    def __init__(self, theirs: int | Literal["unknown"], ours: int) -> None:
        self.theirs, self.ours = theirs, ours
        super().__init__(f"it uses wire version {theirs}, and this process version {ours}")


@dataclass(frozen=True)
class EventFields:
    """Mark a dict as holding an event's fields, which are checked against the event's class.

    Args:
        event: The event.
        without: Fields set by the receiver.
        has_time: True if the dict must have the event's time; otherwise the receiver sets it.
    """

    event: type[events.Event]
    without: tuple[str, ...] = ()
    has_time: bool = False

    @functools.cached_property
    def allowed(self) -> frozenset[str]:
        """Names of the fields that the dict may contain."""
        # The coordinator sets these two fields, so that a peer cannot log to another job or choose
        # a position in the log.
        excluded = {"job_id", "seq", *self.without}
        return frozenset(f.name for f in dataclasses.fields(self.event)) - excluded

    @functools.cached_property
    def required(self) -> frozenset[str]:
        """Names of the fields that the dict must contain."""
        optional = {f.name for f in dataclasses.fields(self.event) if _has_default(f)}
        return self.allowed - optional - (set() if self.has_time else {"time"})

    @functools.cached_property
    def has_lists(self) -> bool:
        """True if a field is a list, which Dask turns into a tuple."""
        return any(str(f.type).startswith("list[") for f in dataclasses.fields(self.event))


class Vocabulary(Generic[M]):
    """The messages that one process may send to another.

    Args:
        union: The union of the message classes.
        version: This process's wire version, which every hello must carry.
    """

    def __init__(self, union: Any, *, version: int) -> None:
        classes = typing.get_args(union) or (union,)
        self._by_kind: dict[str, type[Any]] = {cls.__name__: cls for cls in classes}
        self._version = version

    def decode(self, data: Any) -> M:
        """Return the message encoded in a dict.

        Raises:
            WireVersionError: If the peer uses another version.
            MalformedMessageError: If it is not a message in this vocabulary.
        """
        message: M = decode_fields(self.class_of(data), data, ignore=KIND)
        return message

    def includes(self, data: Any) -> bool:
        """Return whether a dict is of a kind in this vocabulary. Its fields are not checked."""
        kind = data.get(KIND) if isinstance(data, dict) else None
        return isinstance(kind, str) and kind in self._by_kind

    def class_of(self, data: Any) -> type[M]:
        """Return the class of an encoded message. Its fields are not checked, except the version.

        Raises:
            WireVersionError: If the peer uses another version.
            MalformedMessageError: If it is of no kind in this vocabulary.
        """
        if not isinstance(data, dict):
            raise MalformedMessageError(f"{_name_of(data)} is not a message")
        kind = data.get(KIND)
        cls = self._by_kind.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise MalformedMessageError(
                f"unknown message {str(kind)[:80]!r}; known: {', '.join(self._by_kind)}"
            )
        # Check the version before the fields, because a hello from another version may have
        # different fields, and "has no field x" would not reveal the cause.
        if VERSION in _shape_of(cls).decoders:
            check_version(data.get(VERSION), self._version)
        return cls


def check_version(theirs: Any, ours: int) -> None:
    """Refuse a peer whose wire version differs from this process's.

    Raises:
        WireVersionError: With both versions.
    """
    if theirs != ours:
        # Anything but an integer counts as unknown, because the value is from an untrusted peer.
        known = isinstance(theirs, int) and not isinstance(theirs, bool)
        raise WireVersionError(theirs if known else "unknown", ours)


def encode(message: Any) -> Encoded:
    """Return a message as one dict of plain values. Lists of records are not copied."""
    return {KIND: type(message).__name__, **encode_fields(message)}


def encode_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict of plain values."""
    # Not dataclasses.asdict, which copies every list and dict. A job with fast steps sends
    # thousands of step records per second.
    nested = _shape_of(type(value)).nested
    fields = vars(value)
    if not nested:
        return dict(fields)
    return {name: _encode_nested(item) if name in nested else item for name, item in fields.items()}


def decode_fields(cls: type[Any], data: Mapping[str, Any], *, ignore: str = "") -> Any:
    """Build a dataclass from a dict, checking every field.

    Raises:
        MalformedMessageError: If a field is missing or unknown, or has the wrong type.
    """
    # Unknown fields are an error, because within one wire version both ends have the same classes,
    # so an unknown field is a defect or an attack.
    shape = _shape_of(cls)
    values = {}
    for name, item in data.items():
        if name == ignore:
            continue
        decode = shape.decoders.get(name)
        if decode is None:
            raise MalformedMessageError(f"{cls.__name__} has no field {str(name)[:80]!r}")
        values[name] = decode(item, f"{cls.__name__}.{name}")
    missing = shape.required - values.keys()
    if missing:
        raise MalformedMessageError(f"{cls.__name__} lacks {', '.join(sorted(missing))}")
    return cls(**values)


# --- field types ---


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """Field decoders and kinds for one class."""

    decoders: dict[str, Decode]
    """By field name."""
    required: frozenset[str]
    """Fields without a default."""
    nested: frozenset[str]
    """Fields that may hold our dataclasses."""


# ``get_type_hints`` evaluates annotations from text, so call it only once per class.
_shapes: dict[type[Any], _Shape] = {}


def _shape_of(cls: type[Any]) -> _Shape:
    shape = _shapes.get(cls)
    if shape is None:
        fields = dataclasses.fields(cls)
        hints = typing.get_type_hints(cls, include_extras=True)
        shape = _shapes[cls] = _Shape(
            decoders={f.name: _decoder_of(hints[f.name]) for f in fields},
            required=frozenset(f.name for f in fields if not _has_default(f)),
            nested=frozenset(f.name for f in fields if _holds_dataclass(hints[f.name])),
        )
    return shape


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return not (
        field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _holds_dataclass(hint: Any) -> bool:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return True
    return any(_holds_dataclass(part) for part in typing.get_args(hint))


def _encode_nested(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, dict):
        return {key: _encode_nested(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_encode_nested(item) for item in value)
    return value


def _decoder_of(hint: Any) -> Decode:
    # This is called once per field, when a class is first used. So an unsupported type fails in any
    # test that decodes the message, not in production.
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value, path: _with_lists(value)
    if hint in _SCALARS:
        return _scalar(_SCALARS[hint], hint.__name__)
    if origin is Annotated:
        return _event_fields(args[1])
    if origin is Literal:
        return _literal(args)
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return _sequence(_decoder_of(args[0]))
        return _fixed_tuple([_decoder_of(arg) for arg in args])
    if origin is dict:
        return _mapping(_decoder_of(args[1]))
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    raise TypeError(f"a message cannot have a field of type {hint}")


# Exact types: ``isinstance`` would accept True for an int, because bool is a subclass.
_SCALARS: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (float, int),  # an int in place of a float, such as 0, loses nothing
    bytes: (bytes, bytearray, memoryview),
}


def _scalar(fitting: tuple[type, ...], name: str) -> Decode:
    def decode(value: Any, path: str) -> Any:
        if type(value) not in fitting:
            raise MalformedMessageError(f"{path} is {_name_of(value)} instead of {name}")
        return bytes(value) if name == "bytes" else value

    return decode


def _literal(allowed: tuple[Any, ...]) -> Decode:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, str) or value not in allowed:
            raise MalformedMessageError(f"{path} is {str(value)[:80]!r}, not one of {allowed}")
        return value

    return decode


def _union(args: tuple[Any, ...]) -> Decode:
    # ``X | None``, or one of several messages, distinguished by their kind.
    others = [arg for arg in args if arg is not type(None)]
    has_none = len(others) < len(args)
    if len(others) == 1:
        inner = _decoder_of(others[0])
    else:
        by_kind = {cls.__name__: _dataclass(cls) for cls in others}

        def inner(value: Any, path: str) -> Any:
            kind = value.get(KIND) if isinstance(value, dict) else None
            if not isinstance(kind, str) or kind not in by_kind:
                raise MalformedMessageError(f"{path} is not one of {', '.join(by_kind)}")
            return by_kind[kind](value, path)

    if not has_none:
        return inner
    return lambda value, path: None if value is None else inner(value, path)


def _sequence(inner: Decode) -> Decode:
    def decode(value: Any, path: str) -> Any:
        if type(value) not in (list, tuple):
            raise MalformedMessageError(f"{path} is {_name_of(value)} instead of a list")
        # A list comprehension is faster than a generator, and a report may contain hundreds of
        # steps.
        return tuple([inner(item, path) for item in value])

    return decode


def _fixed_tuple(inner: list[Decode]) -> Decode:
    def decode(value: Any, path: str) -> Any:
        if type(value) not in (list, tuple) or len(value) != len(inner):
            raise MalformedMessageError(f"{path} is not a list of {len(inner)} values")
        return tuple(decode(item, path) for decode, item in zip(inner, value, strict=True))

    return decode


def _mapping(inner: Decode) -> Decode:
    def decode(value: Any, path: str) -> Any:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise MalformedMessageError(f"{path} is not a mapping with text keys")
        return {key: inner(item, path) for key, item in value.items()}

    return decode


def _dataclass(cls: Any) -> Decode:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise MalformedMessageError(f"{path} is {_name_of(value)} instead of {cls.__name__}")
        return decode_fields(cls, value, ignore=KIND)

    return decode


def _event_fields(mark: EventFields) -> Decode:
    # Step records make up most of the traffic, so this path is short: the dict is returned
    # unchanged, and each sequence of names is checked only once. Peers choose the names, so the
    # cache is bounded.
    known: set[tuple[str, ...]] = set()

    def decode(value: Any, path: str) -> Any:
        if type(value) is not dict:
            raise MalformedMessageError(f"{path} is {_name_of(value)} instead of a mapping")
        order = tuple(value)
        if order not in known:  # all of a job's records have the same names in the same order
            names = value.keys()
            if not mark.required <= names <= mark.allowed:
                wrong = sorted(map(str, (mark.required - names) | (names - mark.allowed)))
                raise MalformedMessageError(
                    f"{path} has missing or unknown fields of {mark.event.__name__}: "
                    f"{str(wrong)[:200]}"
                )
            if len(known) < MAX_KNOWN:
                known.add(order)
        try:
            events.check_types(mark.event.__name__, value)
        except TypeError as exc:
            raise MalformedMessageError(f"{path}: {exc}") from None
        return _with_lists(value) if mark.has_lists else value

    return decode


def _with_lists(value: Any) -> Any:
    # Dask decodes msgpack arrays as tuples (``use_list=False``), our channel decodes them as lists.
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    return value


def _name_of(value: Any) -> str:
    return type(value).__name__
