from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from awexd.manifests import SEALS, bundle, is_body, read_manifest, read_sealed, sealed_memfd, unbundle
from awexd_transports.encoding import Header
from awexd_transports.errors import ProtocolError
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec, body_digest

F_ADD_SEALS = 1033
MANIFEST = Manifest.of([Entry(TensorSpec("model.layers.0.w", (4, 2), "bfloat16"), Box((0, 0), (4, 2)), 0)])


@contextmanager
def memfd(body: bytes, seals: int) -> Iterator[int]:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(fd, body)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("body", [b"", b"x", b"manifest" * 10_000])
def test_sealed_body_is_read_back_and_cannot_be_changed(body: bytes) -> None:
    fd = sealed_memfd("x", [body[:3], body[3:]])
    assert read_sealed(fd) == body
    assert read_manifest(fd, body_digest(body)) == body
    for change in (lambda: os.pwrite(fd, b"y", 0), lambda: os.ftruncate(fd, 1 << 20), lambda: os.ftruncate(fd, 0)):
        if body:
            with pytest.raises(OSError):  # noqa: PT011 - EPERM
                change()
    os.close(fd)


@pytest.mark.parametrize("missing", [1, 2, 4, 8])
def test_memfd_without_one_of_the_seals_is_refused(missing: int) -> None:
    with memfd(b"body", SEALS & ~missing) as fd, pytest.raises(ProtocolError, match="must be sealed"):
        read_sealed(fd)


def test_what_is_no_memfd_is_refused() -> None:
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as file:
        for fd in (reading, writing, file.fileno()):
            with pytest.raises(ProtocolError, match=r"memfd|sealed"):
                read_sealed(fd)
    os.close(reading)
    os.close(writing)


def test_body_beyond_the_limit_is_refused_unread() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 44)
    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
    with pytest.raises(ProtocolError, match="at most"):
        read_sealed(fd)
    os.close(fd)


def test_body_of_another_digest_is_refused() -> None:
    with memfd(b"body", SEALS) as fd, pytest.raises(ProtocolError, match="digest"):
        read_manifest(fd, body_digest(b"other"))


def test_bundle_is_taken_apart_again_with_each_body_once() -> None:
    bodies = {body_digest(body): body for body in (b"one", b"", b"three")}
    one, empty, three = bodies
    index, fd = bundle([one, three, one, empty], bodies)
    assert index == [[one, 3], [three, 5], [empty, 0]]
    assert unbundle([(str(digest), int(nbytes)) for digest, nbytes in index], fd) == bodies
    with pytest.raises(ProtocolError, match="does not hold"):
        unbundle([(one, 4)], fd)
    with pytest.raises(ProtocolError, match="does not hold"):
        unbundle([(one, 3), (three, 4)], fd)
    os.close(fd)


def test_a_manifest_goes_through_memfd_and_bundle_under_its_own_digest() -> None:
    fd = sealed_memfd("x", [MANIFEST.encoded])
    assert read_manifest(fd, MANIFEST.digest) == MANIFEST.encoded
    os.close(fd)
    index, fd = bundle([MANIFEST.digest] * 3, {MANIFEST.digest: MANIFEST.encoded})
    assert index == [[MANIFEST.digest, len(MANIFEST.encoded)]]
    bodies = unbundle([(str(digest), int(nbytes)) for digest, nbytes in index], fd)
    assert Manifest.decode(bodies[MANIFEST.digest], MANIFEST.digest) == MANIFEST
    os.close(fd)


@pytest.mark.parametrize("body", [MANIFEST.encoded[:-1], MANIFEST.encoded + b"x", Header(0, 0, 0, 0, 0, 9).packed()])
def test_damaged_manifest_is_refused_whatever_its_digest(body: bytes) -> None:
    fd = sealed_memfd("x", [body])
    with pytest.raises(ProtocolError):
        read_manifest(fd, MANIFEST.digest)
    os.close(fd)
    assert not is_body(body, MANIFEST.digest)
    assert is_body(MANIFEST.encoded, MANIFEST.digest)
