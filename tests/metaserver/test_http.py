"""Requests that are none: the parser by itself, and a server that lives through all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awexd.metaserver.http import MAX_HEADERS, Refused, parse

PLAIN = b"GET /v1/status HTTP/1.1\r\nHost: localhost"


def test_head_is_parsed() -> None:
    head = parse(PLAIN + b"\r\nX-Some:  a b\t\r\ncontent-length: 12\r\nConnection: Close")
    assert (head.method, head.path, head.query, head.length, head.closes) == ("GET", "/v1/status", "", 12, True)
    assert head.headers["x-some"] == "a b"
    assert parse(PLAIN.replace(b"status", b"status?a=1&b=2")).query == "a=1&b=2"


MALFORMED = {
    "nothing": (b"", 400),
    "a pickle": (b"\x80\x04\x95pickle.", 400),
    "no version": (b"GET /v1/status\r\nHost: a", 400),
    "an old version": (PLAIN.replace(b"1.1", b"1.0"), 505),
    "a later version": (PLAIN.replace(b"1.1", b"2.0"), 400),
    "a method in small letters": (PLAIN.replace(b"GET", b"get"), 400),
    "a whole URL": (PLAIN.replace(b"/v1", b"http://h/v1"), 400),
    "two blanks": (PLAIN.replace(b"GET ", b"GET  "), 400),
    "a control character in the path": (PLAIN.replace(b"status", b"st\x00atus"), 400),
    "a path that is too long": (PLAIN.replace(b"status", b"s" * 3000), 400),
    "a bare line feed": (PLAIN + b"\nX: y", 400),
    "a header without a colon": (PLAIN + b"\r\nX", 400),
    "a header that is folded": (PLAIN + b"\r\nX: y\r\n z", 400),
    "a blank before the colon": (PLAIN + b"\r\nX : y", 400),
    "a header of no name": (PLAIN + b"\r\n: y", 400),
    "a NUL in a header": (PLAIN + b"\r\nX: \x00", 400),
    "no host": (b"GET / HTTP/1.1\r\nX: y", 400),
    "two hosts": (PLAIN + b"\r\nhost: b", 400),
    "two lengths": (PLAIN + b"\r\nContent-Length: 1\r\nContent-Length: 1", 400),
    "a negative length": (PLAIN + b"\r\nContent-Length: -1", 400),
    "a signed length": (PLAIN + b"\r\nContent-Length: +1", 400),
    "a length in hexadecimal": (PLAIN + b"\r\nContent-Length: 0x1", 400),
    "a length of other digits": (PLAIN + "\r\nContent-Length: ²".encode("latin-1"), 400),
    "a huge length": (PLAIN + b"\r\nContent-Length: " + b"9" * 16, 400),
    "an empty length": (PLAIN + b"\r\nContent-Length:", 400),
    "two lengths in one": (PLAIN + b"\r\nContent-Length: 1, 1", 400),
    "chunks": (PLAIN + b"\r\nTransfer-Encoding: chunked", 501),
    "chunks and a length": (PLAIN + b"\r\nTransfer-Encoding: chunked\r\nContent-Length: 3", 501),
    "too many headers": (PLAIN + b"".join(b"\r\nX%d: y" % number for number in range(MAX_HEADERS)), 431),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_head_is_refused(what: str) -> None:
    head, status = MALFORMED[what]
    with pytest.raises(Refused) as failure:
        parse(head)
    assert failure.value.status == status


SPOILT = st.builds(lambda at, junk: PLAIN[:at] + junk + PLAIN[at:], st.integers(0, 40), st.binary())


@given(st.binary(max_size=200) | SPOILT)
def test_any_bytes_are_parsed_or_refused(head: bytes) -> None:
    try:
        found = parse(head)
    except Refused as refusal:
        status = refusal.status
    else:
        status = 0
        assert head.startswith(f"{found.method} {found.path}".encode())
    assert status == 0 or 400 <= status < 600
