"""Tickets: a MetaServer's word, to one node's daemon, that another may fetch a version of a job from it.

A daemon that serves has a key of its own from the MetaServer. The key of a ticket is an HMAC of the ticket under that
one: the MetaServer gives it to the daemon that fetches, and the one that serves computes it from the ticket alone. Each
side then proves to the other that it knows it (``proof``); no key ever crosses the connection between them.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import asdict, dataclass, fields

import orjson

from awexd_transports.errors import AccessDenied

KEY_BYTES = NONCE_BYTES = 32
SESSION = (0, 0, 0)
"""Epoch, step and attempt of a ticket that is for a client's session, not for a version: versions begin at epoch 1."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who may fetch what from whom.

    Attributes:
        job: ``owner/name``. ``epoch``, ``step``, ``attempt``: the version.
        source, target: the nodes that serve and fetch.
        run: names the MetaServer's process, whose clock ``expires`` is of.
        expires: its monotonic clock, in milliseconds.
        serial: no two tickets are alike.
    """

    job: str
    epoch: int
    step: int
    attempt: int
    source: str
    target: str
    run: str
    expires: int
    serial: str

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))


def decode(body: bytes) -> Ticket:
    """A ticket from the wire; nothing about it is proven yet.

    Raises:
        AccessDenied: it is none.
    """
    try:
        values = orjson.loads(body)
        kinds = {field.name: int if field.type == "int" else str for field in fields(Ticket)}
        if type(values) is not dict or {key: type(value) for key, value in values.items()} != kinds:
            raise ValueError("not the fields of a ticket")
    except ValueError as error:
        raise AccessDenied(f"a ticket that cannot be read: {error}") from error
    return Ticket(**values)


def key_of(node_key: bytes, body: bytes) -> bytes:
    """The key of an encoded ticket for the node that has this key."""
    return hmac.digest(node_key, b"awexd ticket\0" + body, "sha256")


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, side: str, own: bytes, other: bytes) -> bytes:
    """What a side (``"source"`` or ``"target"``) shows for its own nonce and the other's."""
    return hmac.digest(key, side.encode() + b"\0" + own + other, "sha256")


def proves(shown: bytes, key: bytes, side: str, own: bytes, other: bytes) -> bool:
    """Whether the other side, so named, showed the right proof; its nonce is ``own`` here, as it was there."""
    return hmac.compare_digest(shown, proof(key, side, own, other))
