from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from awexd.tickets import KEY_BYTES, NONCE_BYTES, Ticket, decode, key_of, nonce, proof, proves
from awexd_transports.errors import AccessDenied

TICKET = Ticket("alice/grpo", 3, 7, 11, "n0", "n1", "run", 160_000, "serial")
ENCODED = (
    b'{"job":"alice/grpo","epoch":3,"step":7,"attempt":11,"source":"n0","target":"n1","run":"run",'
    b'"expires":160000,"serial":"serial"}'
)
NODE_KEY = bytes(range(KEY_BYTES))


def test_encoding_is_fixed() -> None:
    assert TICKET.encode() == ENCODED
    assert decode(ENCODED) == TICKET


def test_key_and_proof_are_hmacs_of_what_they_are_bound_to() -> None:
    key = hmac.new(NODE_KEY, b"awexd ticket\0" + ENCODED, hashlib.sha256).digest()
    assert key_of(NODE_KEY, ENCODED) == key
    assert proof(key, "source", b"own", b"other") == hmac.new(key, b"source\0ownother", hashlib.sha256).digest()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Ticket)])
def test_another_ticket_has_another_key(name: str) -> None:
    value = getattr(TICKET, name)
    changed: dict[str, Any] = {name: value + 1 if isinstance(value, int) else value + "x"}
    other = dataclasses.replace(TICKET, **changed)
    assert key_of(NODE_KEY, other.encode()) != key_of(NODE_KEY, ENCODED)


def test_each_side_proves_to_the_other_that_it_knows_the_key() -> None:
    key, ours, theirs = key_of(NODE_KEY, ENCODED), nonce(), nonce()
    assert len(ours) == NONCE_BYTES
    assert ours != theirs
    shown = proof(key, "source", ours, theirs)
    assert proves(shown, key, "source", ours, theirs)
    for wrong in (
        proves(shown, key, "target", ours, theirs),  # nobody's proof is sent back to them
        proves(shown, key, "source", theirs, ours),
        proves(shown, key, "source", ours, nonce()),
        proves(shown, key_of(bytes(KEY_BYTES), ENCODED), "source", ours, theirs),
        proves(shown[:-1], key, "source", ours, theirs),
        proves(b"", key, "source", ours, theirs),
    ):
        assert wrong is False


FIELDS = orjson.loads(ENCODED)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80\x04\x95pickle.",
        b"null",
        b"[]",
        b"{}",
        ENCODED[:-1],
        b"[" * 5000,
        orjson.dumps({**FIELDS, "more": 1}),
        orjson.dumps({key: value for key, value in FIELDS.items() if key != "serial"}),
        orjson.dumps({**FIELDS, "epoch": True}),
        orjson.dumps({**FIELDS, "epoch": 1.0}),
        orjson.dumps({**FIELDS, "epoch": "1"}),
        orjson.dumps({**FIELDS, "job": None}),
        orjson.dumps({**FIELDS, "job": ["a"]}),
        b'{"job":"\xff"}',
    ],
)
def test_what_is_no_ticket_is_refused(body: bytes) -> None:
    with pytest.raises(AccessDenied):
        decode(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_ticket_or_refused(body: bytes) -> None:
    try:
        decode(body)
    except AccessDenied:
        return
    raise AssertionError(f"{body!r} was taken for a ticket")
