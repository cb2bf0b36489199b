"""How the channel between daemons behaves."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from awexd.peers.wire import MAX_PIECE
from awexd_transports.errors import InvalidArgument

MAX_STREAMS = 64


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Times are in seconds, sizes in bytes.

    Attributes:
        streams: connections to each source. One moves as much as a core does; more pay on links that one does not fill.
        piece_bytes: what is asked for at once; progress, retries and what is served on go by it.
        connect, handshake: until there is a connection, and until both sides are proven.
        first_byte: until a source begins to answer, or says that it waits itself.
        stall: without a byte in the middle of a piece, on either side.
        idle: that a connection may stay open without a request.
        retries: connections in a row to one source that may fail without a piece.
        strikes: pieces of one source that may be wrong.
        unproven: connections at once that have not proven who they are; one more ends the oldest.
        connections: proven ones at once.
        server_tls, client_tls: of mutual TLS; None: the bytes are neither private nor authentic.
    """

    streams: int = 1
    piece_bytes: int = 32 << 20
    connect: float = 5.0
    handshake: float = 5.0
    first_byte: float = 5.0
    stall: float = 5.0
    idle: float = 60.0
    retries: int = 2
    strikes: int = 3
    unproven: int = 64
    connections: int = 1024
    server_tls: ssl.SSLContext | None = field(default=None, repr=False)
    client_tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (1 <= self.piece_bytes <= MAX_PIECE and 1 <= self.streams <= MAX_STREAMS):
            raise InvalidArgument(
                f"{self.piece_bytes} bytes a piece and {self.streams} streams: there are 1 to {MAX_PIECE}, and 1 to "
                f"{MAX_STREAMS}"
            )
