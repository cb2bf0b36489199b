"""Both sides prove to each other that they know a ticket's key, before any other byte is believed.

    target: protocol, ticket, nonce       source: protocol, nonce, proof
    target: proof                         source: ready, or why not

A source that lets nobody in says the same whatever was wrong.
"""

from __future__ import annotations

from typing import Any

from awexd import tickets
from awexd.peers.link import Link
from awexd.peers.wire import LENGTH, MAX_GREETING, PROTOCOL, decode_greeting, encode_greeting, error_of
from awexd_transports.base import Admission, Source
from awexd_transports.errors import AccessDenied, AwexdError, ProtocolError

REFUSED = encode_greeting({"protocol": PROTOCOL, "refused": True})
MAX_SERVES = 16


async def admit(link: Link, admission: Admission, within: float) -> tickets.Ticket:
    """The source's part, up to the target's proof: what it may fetch. Answers no refusal.

    Raises:
        AccessDenied, ProtocolError: it is not let in; the text is for the log, not for the other side.
        ConnectionError, TimeoutError: it is gone, or silent.
    """
    hello = await hear(link, within)
    if hello.get("protocol") != PROTOCOL:
        raise ProtocolError(f"another protocol: {hello.get('protocol')!r}")
    body, theirs = _text(hello, "ticket").encode(errors="surrogatepass"), _bytes(hello, "nonce", tickets.NONCE_BYTES)
    ticket = tickets.decode(body)
    now = admission.now_ms(ticket.run)
    if now is None:
        raise AccessDenied("a ticket of another MetaServer, or of another run of it")
    if now >= ticket.expires:
        raise AccessDenied(f"a ticket that expired {now - ticket.expires} ms ago")
    if ticket.source != admission.node or not ticket.target or ticket.target == admission.node:
        raise AccessDenied(f"a ticket from {ticket.source!r} to {ticket.target!r}, shown to {admission.node!r}")
    key, ours = tickets.key_of(admission.key, body), tickets.nonce()
    shown = tickets.proof(key, "source", ours, theirs)
    await link.send(encode_greeting({"protocol": PROTOCOL, "nonce": ours.hex(), "proof": shown.hex()}), within)
    answer = _bytes(await hear(link, within), "proof", tickets.KEY_BYTES)
    if not tickets.proves(answer, key, "target", theirs, ours):
        raise AccessDenied(f"{ticket.target!r} does not know the key of its ticket")
    return ticket


async def introduce(link: Link, source: Source, within: float) -> tuple[str, ...]:
    """The target's part; returns when the source serves: the transports by which it does, beside ``tcp``.

    Raises:
        AccessDenied: it lets this node not in, or does not know the ticket's key itself.
        ProtocolError: it is of another version, or broken.
        AwexdError: it has proven itself, and cannot serve that version.
        ConnectionError, TimeoutError: it is gone, or silent.
    """
    ours = tickets.nonce()
    hello = {"protocol": PROTOCOL, "ticket": source.ticket.decode(), "nonce": ours.hex()}
    await link.send(encode_greeting(hello), within)
    challenge = await hear(link, within)
    _check(challenge)
    theirs = _bytes(challenge, "nonce", tickets.NONCE_BYTES)
    shown = _bytes(challenge, "proof", tickets.KEY_BYTES)
    if not tickets.proves(shown, source.key, "source", theirs, ours):
        raise AccessDenied("it does not know the key of the ticket: it is not the node that the ticket names")
    proof = tickets.proof(source.key, "target", ours, theirs)
    await link.send(encode_greeting({"proof": proof.hex()}), within)
    welcome = await hear(link, within)
    if "error" in welcome:
        raise error_of(welcome["error"])
    _check(welcome)
    if welcome.get("ready") is not True:
        raise ProtocolError("an answer that is neither ready nor refused")
    serves = welcome.get("serves", [])
    if type(serves) is not list or len(serves) > MAX_SERVES or any(type(name) is not str for name in serves):
        raise ProtocolError("an answer whose transports are no names")
    return tuple(serves)


def ready(serves: tuple[str, ...]) -> bytes:
    """A source's last word to a target that it serves: by what, where that is not ``tcp`` alone."""
    return encode_greeting({"ready": True} | ({"serves": list(serves)} if serves != ("tcp",) else {}))


async def hear(link: Link, within: float) -> dict[str, Any]:
    """One message of the greeting.

    Raises:
        ProtocolError: too long, or none.
        ConnectionError, TimeoutError: the other side is gone, or silent.
    """
    head = bytearray(LENGTH.size)
    await link.receive(memoryview(head), within)
    (length,) = LENGTH.unpack(head)
    if length > MAX_GREETING:
        raise ProtocolError(f"a greeting of {length} bytes: no awexd, or one with TLS where this node has none")
    body = bytearray(length)
    await link.receive(memoryview(body), within)
    return decode_greeting(body)


def refusal(error: AwexdError) -> bytes:
    """For a target that has proven itself: why it cannot be served."""
    return encode_greeting({"error": {"code": error.code, "message": error.message[: MAX_GREETING // 8]}})


def _check(message: dict[str, Any]) -> None:
    if message.get("protocol", PROTOCOL) != PROTOCOL:
        raise ProtocolError(f"it speaks protocol {message['protocol']!r}, this node {PROTOCOL}")
    if "refused" in message:
        raise AccessDenied("it refused: the ticket may have expired, or not be for these two nodes")


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if type(value) is not str:
        raise ProtocolError(f"a greeting without {name}")
    return value


def _bytes(message: dict[str, Any], name: str, length: int) -> bytes:
    try:
        value = bytes.fromhex(_text(message, name))
    except ValueError as error:
        raise ProtocolError(f"a greeting whose {name} is not hexadecimal") from error
    if len(value) != length:
        raise ProtocolError(f"a greeting whose {name} has {len(value)} bytes")
    return value
