from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awexd.protocol import (
    MAX_DEADLINE_MS,
    MAX_FDS,
    MAX_FRAME_BYTES,
    OPERATIONS,
    Decoder,
    Message,
    check_hello,
    encode,
    error_reply,
    hello,
    parse_request,
)
from awexd_transports.errors import InvalidArgument, ProtocolError, VersionUnavailable, from_wire


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    made = Decoder()
    yield made
    made.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def messages(decoder: Decoder, data: bytes, fds: list[int] | None = None) -> list[tuple[Message, list[int]]]:
    return list(decoder.feed(data, fds or []))


# golden bytes: a change here is a change of the protocol, and needs another protocol version


def test_hello_golden() -> None:
    assert encode(hello("0.1.0", pid=7)) == (
        b'\x46\x00\x00\x00{"hello":{"protocol":4,"version":"0.1.0","max_frame":1048576,"pid":7}}'
    )


def test_request_golden() -> None:
    request = {"id": 1, "op": "read.wait", "args": {"step": 58}, "deadline_ms": 60000}
    assert encode(request) == b'\x40\x00\x00\x00{"id":1,"op":"read.wait","args":{"step":58},"deadline_ms":60000}'


def test_error_reply_golden() -> None:
    error = VersionUnavailable("step 1 is not held", {"held": [[1, 3]]})
    assert encode(error_reply(3, error)) == (
        b"\x69\x00\x00\x00"
        b'{"id":3,"error":{"code":"version_unavailable","message":"step 1 is not held","details":{"held":[[1,3]]}}}'
    )


def test_error_comes_back_as_what_it_was() -> None:
    body = error_reply(3, VersionUnavailable("m", {"held": []}))["error"]
    error = from_wire(body["code"], body["message"], body["details"])
    assert isinstance(error, VersionUnavailable)
    assert isinstance(error, LookupError)
    assert (error.message, error.details) == ("m", {"held": []})


def test_operations_are_these() -> None:
    names = (
        "write.register write.ready write.reserve write.slot write.publish "
        "write.begin write.progress write.seal write.abort write.committed "
        "write.lend write.choose write.borrow write.affirm write.captured write.revoke write.asked write.give "
        "write.offer read.exchanges group.join group.manifests group.publish group.address group.agree group.watch "
        "group.done "
        "read.sources read.register read.siblings read.resolve read.confirm read.release read.wait read.engine "
        "read.arriving read.arrived "
        "read.verified read.await "
        "phase.enter phase.leave park.begin park.open park.seal park.drop park.pin park.unpin "
        "segment.open segment.closed segment.dropped segment.chunks session.home goodbye "
        "job.close job.grant status versions sessions manifests events "
        "drop rollback gc"
    )
    assert sorted(OPERATIONS) == sorted(names.split())


# frames


def test_largest_frame_passes_and_one_more_byte_does_not(decoder: Decoder) -> None:
    overhead = len(encode({"x": ""})) - 4
    message = {"x": "y" * (MAX_FRAME_BYTES - overhead)}
    assert messages(decoder, encode(message)) == [(message, [])]
    with pytest.raises(ProtocolError, match="1048577 bytes"):
        encode({"x": message["x"] + "y"})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), "a frame of 1048577 bytes"),
        (struct.pack("<I", 0xFFFFFFFF), "a frame of 4294967295 bytes"),
        (frame(b""), "not JSON"),
        (frame(b"{"), "not JSON"),
        (frame(b"{}x"), "not JSON"),
        (frame(b"\x80\x04K\x01."), "not JSON"),
        (frame(b'{"a":\x00}'), "not JSON"),
        (frame(b'{"a":"\x00"}'), "not JSON"),
        (frame(b'{"a":NaN}'), "not JSON"),
        (frame(b"[" * 100_000), "not JSON"),
        (frame(b'{"a":"\xc3\x28"}'), "not JSON"),
        (frame(b"[]"), "a JSON list"),
        (frame(b'"x"'), "a JSON str"),
        (frame(b"null"), "a JSON NoneType"),
        (frame(b'{"fds":1}'), "names 1 descriptors and carries 0"),
        (frame(b'{"fds":-1}'), "names -1 descriptors"),
        (frame(b'{"fds":true}'), "names True descriptors"),
        (frame(b'{"fds":1.0}'), "names 1.0 descriptors"),
        (frame(b'{"fds":"1"}'), "names '1' descriptors"),
        (frame(b'{"fds":null}'), "names None descriptors"),
    ],
)
def test_malformed_frame_is_refused_saying_why(decoder: Decoder, data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        messages(decoder, data)


def test_half_a_frame_waits_for_the_rest(decoder: Decoder) -> None:
    whole = encode({"a": 1})
    for cut in range(len(whole)):
        fresh = Decoder()
        assert messages(fresh, whole[:cut]) == []
        assert messages(fresh, whole[cut:]) == [({"a": 1}, [])]


def test_oversized_frame_is_refused_by_its_length_alone(decoder: Decoder) -> None:
    with pytest.raises(ProtocolError):
        messages(decoder, struct.pack("<I", 2 << 30))


def test_good_messages_before_a_malformed_one_are_delivered(decoder: Decoder) -> None:
    arriving = decoder.feed(encode({"a": 1}) + frame(b"nonsense"))
    assert next(arriving) == ({"a": 1}, [])
    with pytest.raises(ProtocolError):
        next(arriving)


def pipe_ends(count: int) -> tuple[int, list[int]]:
    """A pipe's reading end, and ``count`` descriptors of its writing end."""
    reading, writing = os.pipe()
    return reading, [writing, *(os.dup(writing) for _ in range(count - 1))]


def closed(reading: int) -> bool:
    """Whether every writing end is closed."""
    os.set_blocking(reading, False)
    try:
        return os.read(reading, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(reading)


def test_descriptors_go_to_the_messages_that_name_them(decoder: Decoder) -> None:
    reading, fds = pipe_ends(3)
    data = encode({"n": 1, "fds": 1}) + encode({"n": 2}) + encode({"n": 3, "fds": 2})
    assert [(m["n"], len(taken)) for m, taken in messages(decoder, data, fds)] == [(1, 1), (2, 0), (3, 2)]
    for fd in fds:
        os.close(fd)
    assert closed(reading)


def test_descriptors_that_no_message_took_are_closed_with_the_decoder() -> None:
    reading, fds = pipe_ends(3)
    decoder = Decoder()
    with pytest.raises(ProtocolError, match="carries 3"):
        messages(decoder, encode({"fds": 4}), fds)
    decoder.close()
    assert closed(reading)


def test_descriptors_that_no_message_names_are_refused() -> None:
    reading, fds = pipe_ends(1)
    decoder = Decoder()
    with pytest.raises(ProtocolError, match="1 descriptors that no message names"):
        messages(decoder, encode({}), fds)
    decoder.close()
    assert closed(reading)


def test_descriptors_heaped_on_half_a_frame_are_bounded() -> None:
    reading, fds = pipe_ends(MAX_FDS + 1)
    decoder = Decoder()
    with pytest.raises(ProtocolError, match=f"more than {MAX_FDS} descriptors"):
        messages(decoder, b"\1", fds)
    decoder.close()
    assert closed(reading)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
bodies = st.dictionaries(st.text(max_size=8).filter(lambda key: key != "fds"), values, max_size=4)


@given(st.lists(bodies, max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(sent: list[Message], cuts: list[int]) -> None:
    decoder, data, got = Decoder(), b"".join(map(encode, sent)), []
    while data:
        for size in cuts:
            got += [message for message, _ in decoder.feed(data[:size])]
            data = data[size:]
    assert got == sent


@given(st.binary(max_size=200), st.integers(1, 20))
def test_noise_is_refused_or_waited_for_and_nothing_else(data: bytes, size: int) -> None:
    decoder = Decoder()
    try:
        for start in range(0, len(data), size):
            for message, fds in decoder.feed(data[start : start + size]):
                assert isinstance(message, dict)
                assert fds == []
    except ProtocolError:
        return


# hello


@pytest.mark.parametrize(
    "message",
    [{}, {"hello": None}, {"hello": [1]}, {"hello": {}}, {"hello": {"protocol": 1}}, {"hello": {"protocol": "2"}}],
)
def test_hello_of_another_protocol_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError):
        check_hello(message)


def test_hello_with_more_in_it_is_taken() -> None:
    assert check_hello(hello("9", future=[1]))["future"] == [1]


# requests


GOOD: dict[str, Any] = {"id": 5, "op": "read.wait", "args": {"step": 1}, "deadline_ms": 250}


def test_request_is_parsed() -> None:
    assert parse_request(GOOD) == (5, "read.wait", {"step": 1}, 0.25)
    assert parse_request({"id": 0, "op": "status", "deadline_ms": 0}) == (0, "status", {}, 0.0)


@pytest.mark.parametrize("request_id", [None, "5", -1, True, 1.0, [], 1 << 60])
def test_request_without_an_id_to_answer_to_is_malformed(request_id: Any) -> None:
    with pytest.raises(ProtocolError):
        parse_request(GOOD | {"id": request_id})


NESTED: Any = []
for _ in range(1020):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "changes",
    [
        {"op": None},
        {"op": "read"},
        {"op": ["read.wait"]},
        {"op": NESTED},
        {"args": None},
        {"args": [1]},
        {"args": {}},
        {"args": {"step": 1, "more": 2}},
        {"args": {"step": "1"}},
        {"args": {"step": True}},
        {"args": {"step": 1.0}},
        {"args": {"step": -1}},
        {"args": {"step": (1 << 53) + 1}},
        {"args": {"step": NESTED}},
        {"args": {"step": {"a": NESTED}}},
        {"deadline_ms": None},
        {"deadline_ms": -1},
        {"deadline_ms": MAX_DEADLINE_MS + 1},
        {"deadline_ms": True},
        {"deadline_ms": 1.5},
    ],
)
def test_bad_request_is_refused_with_its_id(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as failure:
        parse_request(GOOD | changes)
    assert failure.value.details == {"id": 5}
    assert len(str(failure.value)) < 1000


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x1b[31m", "x" * 257, 5, None, ["a"], "\u202ereversed"])
def test_text_that_could_not_be_shown_safely_is_refused(name: Any) -> None:
    arguments = {"job": name, "uids": [], "gids": []}
    with pytest.raises(InvalidArgument, match="bad job"):
        parse_request({"id": 1, "op": "job.grant", "args": arguments, "deadline_ms": 1})


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@pytest.mark.parametrize("value", [-1, 1 << 64, 1.5, "\0", [None], {"a": 1}, [[]], "x" * 5000])
def test_no_operation_takes_nonsense_for_any_of_its_arguments(operation: str, value: Any) -> None:
    for name in OPERATIONS[operation]:
        arguments = dict.fromkeys(OPERATIONS[operation]) | {name: value}
        with pytest.raises(InvalidArgument):
            parse_request({"id": 1, "op": operation, "args": arguments, "deadline_ms": 1})


@given(bodies)
def test_any_object_is_a_request_or_refused(message: Message) -> None:
    for body in (message, {"id": 1} | message, GOOD | message, GOOD | {"args": message}):
        try:
            parse_request(body)
        except (ProtocolError, InvalidArgument):
            continue
