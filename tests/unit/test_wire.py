"""The wire: every message survives the way there and back, and what is no message is refused."""

from __future__ import annotations

import contextlib
import typing

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from async_rl import wire
from async_rl.errors import Malformed
from async_rl.transport.base import frame_of
from async_rl.wire import Array, Key
from tests.orchestration import group, sample

KINDS = typing.get_args(wire.AnyMessage)


def strategy_of(annotation):
    """Values of the types that messages are made of."""
    if annotation in (wire.Text, wire.LongText, wire.Name):
        return st.text(max_size=20)
    if annotation is wire.Count:
        return st.integers(0, 2**40)
    if annotation in (wire.Seconds, wire.Amount):
        return st.floats(0, 1e6)
    if annotation is memoryview:
        return st.binary(max_size=16).map(memoryview)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is typing.Annotated:
        if typing.get_origin(args[0]) is tuple:
            return strategy_of(args[0])
        return st.integers(1, 1000) if args[0] is int else st.floats(0.1, 10)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(strategy_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy_of, args))
    if origin is dict:
        values = st.integers(0, 9) if args[1] is typing.Any else strategy_of(args[1])
        return st.dictionaries(strategy_of(args[0]), values, max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        hints = typing.get_type_hints(annotation, include_extras=True)
        fields = {name: strategy_of(hints[name]) for name in annotation.__struct_fields__}
        return st.builds(annotation, **fields)
    simple = {
        int: st.integers(-(2**31), 2**31),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bool: st.booleans(),
    }
    return simple[annotation]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_way_there_and_back(kind):
    @settings(max_examples=15, deadline=None)
    @given(strategy_of(kind))
    def check(message):
        assert wire.decode(wire.encode(message)) == message

    check()


def test_every_message_has_a_tag_of_its_own():
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_message_or_malformed_and_nothing_else(data):
    with contextlib.suppress(Malformed):
        assert isinstance(wire.decode(data), KINDS)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_message_gives_a_message_or_malformed_and_nothing_else(data):
    frame = bytearray(wire.encode(wire.GroupDone(3, group(Key("train", 5), 1))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Malformed):
        assert isinstance(wire.decode(bytes(frame)), KINDS)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (["no_such_tag", 1], "Invalid value 'no_such_tag'"),
        (["announce", "seven", 1], "Expected `int`, got `str`"),
        (["announce", 7], "length"),
        (["credit", -1, 0], ">= 0"),
        (["heartbeat", 0, "sleeping"], "sleeping"),
        ({"version": 1}, "Expected `array`"),
        (["heartbeat", 0, "serving", [], -1, float("nan")], ">= 0.0"),
        (["heartbeat", 0, "serving", [], -1, 0.0, float("inf")], "<= 1"),
        (["heartbeat", 0, "serving", [], -1, 0.0, 0.0, 0, 0, 0, 0.0, float("nan")], ">= 0.0"),
        (["heartbeat", 0, "serving", [], -1, 0.0, 0.0, 0, 0, 0, 0.0, 0.0, float("inf")], "<= 1"),
        (["heartbeat", 0, "serving", [[1, 2]] * (wire.MOST_LEASES + 1)], "length <= 65536"),
        (
            ["heartbeat", 0, "serving", [], -1, 0.0, 0.0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, [1] * 70_000],
            "length <= 65536",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_the_reason(fields, what):
    with pytest.raises(Malformed, match=what):
        wire.decode(msgspec.msgpack.encode(fields))


def test_a_deeply_nested_message_is_refused():
    with pytest.raises(Malformed):
        wire.decode(b"\x91" * 100_000)


def test_a_field_that_was_appended_later_does_not_trouble_an_older_peer():
    newer = ["announce", 7, 3, "appended"]
    assert wire.decode(msgspec.msgpack.encode(newer)) == wire.Announce(7, 3)


def test_a_field_that_was_appended_later_has_its_default_when_an_older_peer_leaves_it_out():
    older = ["refused", "no"]
    assert wire.decode(msgspec.msgpack.encode(older)) == wire.Refused("no", "", False)


def test_nothing_over_the_limit_is_decoded():
    frame = wire.encode(wire.Bye("x" * 100))
    with pytest.raises(Malformed, match="over the limit of 50"):
        wire.decode(frame, 50)


def test_arrays_are_little_endian_bytes_and_decode_into_read_only_views():
    array = Array.of([1, -2, 70000], "<i4")
    assert bytes(array.data) == b"\x01\0\0\0\xfe\xff\xff\xff\x70\x11\x01\x00"
    done = wire.decode(wire.encode(wire.GroupDone(1, group(Key("train", 0)))))
    tokens = done.group.samples[0].tokens.numpy()
    assert tokens.tolist() == [0, 1, 2, 3]
    assert not tokens.flags.writeable and not tokens.flags.owndata


def test_an_array_of_a_broken_length_is_malformed():
    with pytest.raises(Malformed, match="7 bytes"):
        Array("<i4", memoryview(b"1234567")).numpy()


def test_an_array_takes_any_layout_of_numbers():
    grid = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    assert Array.of(grid, "<i4").numpy().tolist() == [0, 2, 4, 6, 8, 10]


def test_a_group_on_the_wire_costs_nine_bytes_per_token_and_little_more():
    long = group(Key("train", 0), samples=(sample(length=1000),) * 8)
    assert len(wire.encode(wire.GroupDone(1, long))) < 8 * 1000 * 9 + 1000


def test_a_long_completion_is_no_malformed_message():
    text = "a" * (2 << 20)  # some hundred thousand tokens: whoever generated them did nothing wrong
    done = wire.GroupDone(1, group(Key("train", 0), samples=(sample(text=text), sample(reward=0.0))))
    assert wire.decode(wire.encode(done)).group.samples[0].text == text


def test_a_text_that_is_none_is_told_of_and_ends_nobody():
    with pytest.raises(Malformed, match="UTF-8"):
        frame_of(wire.Failed(1, Key("train", 0), "half of a pair: \ud800"), wire.MAX_MESSAGE_BYTES)
