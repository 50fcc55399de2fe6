"""Every message survives the wire unchanged; everything else is refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etrain_jupyter.log import events
from etrain_jupyter.wire import codec
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from etrain_jupyter.wire.codec import EventFields, MalformedMessageError, WireVersionError
from etrain_jupyter.wire.versions import WIRE_VERSION
from tests.unit.log.spent import PLAIN_STEP

VOCABULARIES = {
    "to trainer": (m.TO_TRAINER, m.ToTrainer),
    "from trainer": (m.FROM_TRAINER, m.FromTrainer),
    "to supervisor": (m.TO_SUPERVISOR, m.ToSupervisor),
    "forwarded to trainer": (m.FORWARDED, m.ForwardedMessage),
    "from supervisor": (m.FROM_SUPERVISOR, m.FromSupervisor | m.AnyReport),
}
CASES = [
    pytest.param(vocabulary, cls, id=f"{name}: {cls.__name__}")
    for name, (vocabulary, union) in VOCABULARIES.items()
    for cls in typing.get_args(union)
]
REQUESTS = [cls for cls in q.Request.__subclasses__() if cls.__module__ == q.__name__]

NUMBERS = st.integers(1, 2**60)  # a plan has at least one sample
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | FINITE | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    simple = {str: st.text(max_size=5), bool: st.booleans(), int: NUMBERS, float: FINITE}
    simple |= {bytes: st.binary(max_size=5), Any: PLAIN}
    if hint in simple:
        return simple[hint]
    if origin is Annotated:
        return records_of(args[1])
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(strategy_of, args))
    if hint is type(None):
        return st.none()
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(strategy_of(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy_of, args))
    if origin is list:
        return st.lists(strategy_of(args[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), strategy_of(args[1]), max_size=2)
    return messages_of(hint)


def records_of(mark: EventFields) -> st.SearchStrategy[dict[str, Any]]:
    hints = typing.get_type_hints(mark.event)
    return st.fixed_dictionaries(
        {name: strategy_of(hints[name]) for name in sorted(mark.required)},
        optional={name: strategy_of(hints[name]) for name in sorted(mark.allowed - mark.required)},
    )


def messages_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [f.name for f in dataclasses.fields(cls) if f.name != codec.VERSION]
    return st.builds(cls, **{name: strategy_of(hints[name]) for name in names})


def over_the_wire(data: dict[str, Any], *, use_list: bool) -> Any:
    """Return what a peer gets: Dask decodes arrays as tuples, the channel as lists."""
    return msgpack.unpackb(msgpack.packb(data), strict_map_key=False, use_list=use_list)


@pytest.mark.parametrize(("vocabulary", "cls"), CASES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), use_list=st.booleans())
def test_every_message_survives_the_wire_unchanged(vocabulary, cls, data, use_list):
    message = data.draw(messages_of(cls))

    received = vocabulary.decode(over_the_wire(codec.encode(message), use_list=use_list))

    assert received == message
    assert type(received) is cls


@pytest.mark.parametrize("cls", REQUESTS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_request_and_reply_survives_the_wire_unchanged(cls, data):
    request = data.draw(messages_of(cls))
    arguments = over_the_wire(codec.encode_fields(request), use_list=False)
    assert codec.decode_fields(cls, arguments) == request

    reply = data.draw(messages_of(cls.reply))
    encoded = {**codec.encode_fields(reply), codec.VERSION: WIRE_VERSION}
    assert q.decode_reply(request, over_the_wire(encoded, use_list=False)) == reply


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        PLAIN,
        st.fixed_dictionaries(
            {"kind": st.sampled_from([case.values[1].__name__ for case in CASES]) | PLAIN},
            optional={name: PLAIN for name in ("trainer", "records", "number", "generation")},
        ),
    )
)
def test_garbage_raises_only_malformed_message_errors(garbage):
    for vocabulary, _ in VOCABULARIES.values():
        try:
            message = vocabulary.decode(garbage)
        except MalformedMessageError:
            continue
        assert isinstance(message, m.Message)


@pytest.mark.parametrize(("vocabulary", "cls"), CASES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_field_of_another_type_or_a_missing_one_is_refused(vocabulary, cls, data):
    encoded = codec.encode(data.draw(messages_of(cls)))
    hints = typing.get_type_hints(cls)
    strict = [name for name, hint in hints.items() if name in encoded and hint is not Any]
    name = data.draw(st.sampled_from([*strict, codec.KIND]))

    with pytest.raises(MalformedMessageError):
        vocabulary.decode({**encoded, name: object()})
    with pytest.raises(MalformedMessageError, match="has no field 'shell'"):
        vocabulary.decode({**encoded, "shell": "rm"})
    for required in [f.name for f in dataclasses.fields(cls) if not codec._has_default(f)]:
        with pytest.raises(MalformedMessageError, match=required):
            vocabulary.decode({k: v for k, v in encoded.items() if k != required})


RECORD = {
    **{"generation": 1, "time": 1.0, "step": 1, "epoch": 0, "first": 0, "samples": 16},
    **{"sample_checksum": 1, "loss": 1.0, "lr": 0.1, "world_size": 2, "samples_per_s": 160.0},
    **PLAIN_STEP,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "1"}, "step of StepCompleted is str"),
        ({"metrics": {"a": "b"}}, "metrics of StepCompleted has an item of the wrong type"),
        ({"job_id": "another"}, "unknown fields of StepCompleted.*job_id"),
        ({"time": None}, "time of StepCompleted is NoneType"),
    ],
)
def test_record_that_does_not_match_its_event_is_refused(change, words):
    good = codec.encode(m.StepsTrained(records=(RECORD,)))
    assert m.FROM_TRAINER.decode(good) == m.StepsTrained(records=(RECORD,))
    with pytest.raises(MalformedMessageError, match=words):
        m.FROM_TRAINER.decode({**good, "records": ({**RECORD, **change},)})


def test_step_records_are_passed_on_without_a_copy():
    encoded = codec.encode(m.StepsTrained(records=(RECORD,)))
    assert encoded["records"][0] is RECORD
    assert m.FROM_TRAINER.decode(encoded).records[0] is RECORD


@pytest.mark.parametrize(
    ("hello", "theirs"),
    [
        ({"kind": "SpareReady", "wire_version": 99, "new_field": 1}, 99),
        ({"kind": "SpareReady", "wire_version": "x"}, "unknown"),
        ({"kind": "SpareReady"}, "unknown"),
    ],
)
def test_hello_of_another_version_is_refused_with_both_versions(hello, theirs):
    with pytest.raises(WireVersionError, match=r"^it uses wire version .*, and this process") as e:
        m.FROM_TRAINER.decode(hello)
    assert (e.value.theirs, e.value.ours) == (theirs, WIRE_VERSION)


# --- the fence ---


@pytest.mark.parametrize(
    ("message", "counts"),
    [
        # (of the current generation from a member, of an old one, from a former member)
        (m.StepsTrained(generation=4, records=()), (True, False, False)),
        (
            m.UserCodeFailed(generation=4, progress=(0, 0), error="", traceback=""),
            (True, False, False),
        ),
        (
            m.UserCodeFailed(generation=0, progress=(0, 0), error="", traceback=""),
            (True, True, False),
        ),
        (m.TrainerExited(generation=4, cause=""), (True, True, False)),
        (m.CheckpointNotWritten(generation=4, step=1, error=""), (True, True, True)),
        (m.LeaveGeneration(generation=4), (True, False, False)),
        (m.ShutDownTrainer(generation=4), (True, True, False)),
    ],
)
def test_message_counts_in_its_generation_and_while_its_trainer_is_a_member(message, counts):
    found = (
        m.is_current(message, generation=4),
        m.is_current(message, generation=5),
        m.is_current(message, generation=4, is_member=False),
    )
    assert found == counts


def test_job_of_a_trainer_is_part_of_its_name():
    assert m.TrainerExited(trainer="digits-1/w1/3", cause="").job_id == "digits-1"


# --- requests ---


async def test_request_of_another_version_is_refused_before_it_is_carried_out():
    carried_out = []

    async def describe(request: q.DescribeCluster) -> q.Done:
        carried_out.append(request)
        return q.Done()

    answer = q.handler_of(q.DescribeCluster, describe)
    for arguments in ({}, {"wire_version": WIRE_VERSION - 1}, {"wire_version": 99, "new": 1}):
        reply = await answer(**arguments)
        assert reply["error"] == "WireVersionError"
        assert f"and the cluster version {WIRE_VERSION}" in reply["message"]
        assert "Nothing was done" in reply["message"]
        assert "for the kernel and restart it" in reply["message"]
    assert carried_out == []
    assert await answer(wire_version=WIRE_VERSION) == {"wire_version": WIRE_VERSION}


async def test_request_with_a_wrong_argument_is_refused_with_an_explanation():
    async def fetch(request: q.FetchEvents) -> q.EventBatch:
        raise AssertionError(request)

    answer = q.handler_of(q.FetchEvents, fetch)
    for arguments, words in (
        ({}, "FetchEvents lacks job_id"),
        ({"job_id": 3}, "FetchEvents.job_id is int instead of str"),
        ({"job_id": "j", "shell": "rm"}, "FetchEvents has no field 'shell'"),
    ):
        reply = await answer(**arguments, wire_version=WIRE_VERSION)
        assert reply == {
            "error": "MalformedMessageError",
            "message": words,
            "wire_version": WIRE_VERSION,
        }


def test_every_event_that_travels_has_a_type_that_the_log_can_check():
    for _, cls in (case.values for case in CASES):
        for hint in typing.get_type_hints(cls, include_extras=True).values():
            for part in (hint, *typing.get_args(hint)):
                marks = [a for a in typing.get_args(part)[1:] if isinstance(a, EventFields)]
                assert all(issubclass(mark.event, events.Event) for mark in marks)
