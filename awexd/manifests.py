"""Manifest bodies by digest. The daemon interns them unread: only clients plan."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping

from awexd_transports.errors import ProtocolError
from awexd_transports.layout import MAX_MANIFEST_BYTES, body_digest

# linux/fcntl.h; Python 3.11 has no names for the seals.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE
LENT_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
"""Of a memfd that its maker goes on writing into: nobody who maps it can be made to fault."""


def sealed_memfd(name: str, parts: Iterable[bytes]) -> int:
    """A memfd with these bytes that nobody can change any more; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, _F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lasting_memfd(name: str, nbytes: int) -> int:
    """A memfd of zeros whose size nobody can change; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, LENT_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seals_of(fd: int) -> int:
    """Of a memfd.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("a body must travel as a memfd") from error


def read_sealed(fd: int, limit: int = MAX_MANIFEST_BYTES) -> bytes:
    """The bytes of a sealed memfd, read, never mapped.

    Raises:
        ProtocolError: not a memfd, not sealed, or larger than ``limit``.
    """
    if seals_of(fd) & SEALS != SEALS:
        raise ProtocolError("a body's memfd must be sealed against writing, growing and shrinking")
    size = os.fstat(fd).st_size
    if size > limit:
        raise ProtocolError(f"a body of {size} bytes; at most {limit}")
    parts, at = [], 0
    while at < size:
        part = os.pread(fd, min(size - at, 16 << 20), at)
        if not part:
            raise ProtocolError("a body that ends early")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def read_manifest(fd: int, digest: str) -> bytes:
    """A manifest's body as a client sent it.

    Raises:
        ProtocolError: its digest is another.
    """
    body = read_sealed(fd)
    if body_digest(body) != digest:
        raise ProtocolError("a manifest whose digest is another than the one named")
    return body


def is_body(body: bytes, digest: str) -> bool:
    """Whether these bytes, kept for long, still are what they were."""
    try:
        return body_digest(body) == digest
    except ProtocolError:
        return False


def bundle(digests: Iterable[str], bodies: Mapping[str, bytes]) -> tuple[list[list[str | int]], int]:
    """Distinct bodies one after another in a memfd: ``[digest, bytes]`` of each in order, and the descriptor."""
    distinct = list(dict.fromkeys(digests))
    fd = sealed_memfd("awexd-manifests", (bodies[digest] for digest in distinct))
    return [[digest, len(bodies[digest])] for digest in distinct], fd


def unbundle(index: Iterable[tuple[str, int]], fd: int) -> dict[str, bytes]:
    """Bodies by digest; ``fd`` stays the caller's.

    Raises:
        ProtocolError: the bytes are not what the index says.
    """
    body = read_sealed(fd, limit=1 << 40)
    bodies, at = {}, 0
    for digest, nbytes in index:
        bodies[digest] = body[at : at + nbytes]
        at += nbytes
        if body_digest(bodies[digest]) != digest:
            raise ProtocolError("a bundle of manifests that does not hold what it names")
    return bodies
