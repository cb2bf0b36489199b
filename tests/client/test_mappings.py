from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from awexd_client import mappings
from awexd_client.mappings import Mapping
from awexd_transports.errors import IntegrityError
from awexd_transports.threads import shut_down_threads

NBYTES = (5 << 20) + 4096


@pytest.fixture
def segment() -> Iterator[int]:
    fd = os.memfd_create("segment")
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)
    shut_down_threads()


@pytest.mark.parametrize("threads", [1, 3])
def test_pages_are_there_once_mapped(segment: int, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """All of them, also those of the last, shorter call."""
    monkeypatch.setattr(mappings, "_POPULATE_BYTES", 1 << 20)
    monkeypatch.setattr(mappings, "default_threads", lambda: threads)
    assert os.fstat(segment).st_blocks == 0
    writing = Mapping(segment, NBYTES, writable=True)
    assert os.fstat(segment).st_blocks * 512 == NBYTES
    writing.write(NBYTES - 3, b"end")
    reading = Mapping(segment, NBYTES, writable=False)
    assert bytes(reading.read(NBYTES - 3, 3)) == b"end"
    reading.close()
    writing.close()
    assert writing.closed


def test_memory_that_cannot_be_populated_is_mapped_all_the_same(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "_MADV_POPULATE_WRITE", 9999)  # as on a kernel that does not know it
    mapping = Mapping(segment, NBYTES, writable=True)
    mapping.write(0, b"data")
    mapping.close()


def test_a_segment_of_another_size_is_refused(segment: int) -> None:
    with pytest.raises(IntegrityError, match="promised"):
        Mapping(segment, NBYTES + 4096, writable=False)
