from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from awexd.budget import Budget
from awexd.memory import FORMAT, Memory
from awexd_transports.segment import HEADER_BYTES, MAGIC

NBYTES = 10_000
SIZE = HEADER_BYTES + NBYTES


class Daemons:
    """Memories of one namespace, one after the other, as daemons that follow each other have them."""

    def __init__(self) -> None:
        self.namespace = secrets.token_hex(6)
        self.key = secrets.token_bytes(32)
        self._open: list[Memory] = []

    def memory(self, key: bytes | None = None) -> Memory:
        made = Memory(self.namespace, key or self.key, Budget(), lock=False)
        self._open.append(made)
        return made

    def entries(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(f"awexd-{self.namespace}-")]

    def path(self, segment_id: str) -> Path:
        return Path(f"/dev/shm/awexd-{self.namespace}-{segment_id}")

    def end(self) -> None:
        for memory in self._open:
            memory.close()
        for name in self.entries():
            os.unlink(f"/dev/shm/{name}")


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    made = Daemons()
    yield made
    made.end()


def header(**changes: Any) -> dict[str, Any]:
    return {"job": "root/j", "step": 1, "rank": 0, "size": SIZE} | changes


def sealed(daemons: Daemons, **changes: Any) -> str:
    """A segment that one daemon sealed, and let go of."""
    memory = daemons.memory()
    segment_id, _ = memory.create(NBYTES)
    memory.seal(segment_id, header(**changes))
    memory.close()
    return segment_id


def test_segment_has_its_size_its_pages_and_nobody_elses_permissions(daemons: Daemons) -> None:
    memory = daemons.memory()
    segment_id, locked = memory.create(NBYTES)
    found = daemons.path(segment_id).stat()
    assert (found.st_size, locked) == (SIZE, False)
    assert found.st_blocks * 512 >= SIZE, "pages are reserved at creation, not at first touch"
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert memory.total_nbytes == SIZE


def test_names_differ_even_within_a_millisecond(daemons: Daemons) -> None:
    memory = daemons.memory()
    assert len({memory.create(0)[0] for _ in range(20)}) == 20


def test_readers_descriptor_is_read_only_and_the_writers_is_not(daemons: Daemons) -> None:
    memory = daemons.memory()
    segment_id, _ = memory.create(NBYTES)
    reading, writing = memory.descriptor(segment_id, writable=False), memory.descriptor(segment_id, writable=True)
    os.pwrite(writing, b"weights", HEADER_BYTES)
    assert os.pread(reading, 7, HEADER_BYTES) == b"weights"
    with pytest.raises(OSError):  # noqa: PT011 - EBADF
        os.pwrite(reading, b"x", 0)
    for fd in (reading, writing):
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_unlinking_gives_the_memory_and_the_descriptor_back(daemons: Daemons) -> None:
    memory = daemons.memory()
    before = len(os.listdir("/proc/self/fd"))
    segment_id, _ = memory.create(NBYTES)
    memory.unlink(segment_id)
    assert daemons.entries() == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert memory.total_nbytes == 0


def test_sealed_segment_is_found_again_with_its_bytes(daemons: Daemons) -> None:
    segment_id = sealed(daemons)
    (found,) = daemons.memory().adopt()
    assert (found.id, found.nbytes, found.header) == (segment_id, NBYTES, header())


def test_unsealed_and_cleared_segments_are_unlinked(daemons: Daemons) -> None:
    memory = daemons.memory()
    memory.create(NBYTES)
    cleared, _ = memory.create(NBYTES)
    memory.seal(cleared, header())
    memory.clear(cleared)
    memory.close()
    assert daemons.memory().adopt() == []
    assert daemons.entries() == []


def test_segments_of_another_namespace_are_left_alone(daemons: Daemons) -> None:
    other = Daemons()
    theirs = sealed(other)
    assert daemons.memory().adopt() == []
    assert other.path(theirs).exists()
    other.end()


@pytest.mark.parametrize("at", [0, 8, 12, 16, 31, 32, 40])
def test_header_with_one_byte_changed_is_not_believed(daemons: Daemons, at: int) -> None:
    path = daemons.path(sealed(daemons))
    page = bytearray(path.read_bytes())
    page[at] ^= 1
    path.write_bytes(page)
    assert daemons.memory().adopt() == []


def test_header_of_another_segment_is_not_believed(daemons: Daemons) -> None:
    memory = daemons.memory()
    first, _ = memory.create(NBYTES)
    second, _ = memory.create(NBYTES)
    memory.seal(first, header())
    page = daemons.path(first).read_bytes()
    memory.close()
    daemons.path(second).write_bytes(page)
    assert [found.id for found in daemons.memory().adopt()] == [first]


def test_header_of_another_key_is_not_believed(daemons: Daemons) -> None:
    sealed(daemons)
    assert daemons.memory(key=secrets.token_bytes(32)).adopt() == []


@pytest.mark.parametrize("number", [0, 1, FORMAT + 1])
def test_segment_of_another_format_is_unlinked(daemons: Daemons, number: int) -> None:
    path = daemons.path(sealed(daemons))
    with open(path, "r+b") as segment:
        segment.seek(8)
        segment.write(number.to_bytes(4, "little"))
    assert daemons.memory().adopt() == []
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, SIZE - 1, SIZE + 1])
def test_segment_of_another_size_than_its_header_says_is_unlinked(daemons: Daemons, size: int) -> None:
    path = daemons.path(sealed(daemons))
    os.truncate(path, size)
    assert daemons.memory().adopt() == []
    assert not path.exists()


def test_segment_that_a_client_truncated_is_sealed_cleared_and_unlinked_without_a_crash(daemons: Daemons) -> None:
    memory = daemons.memory()
    segment_id, _ = memory.create(NBYTES)
    os.truncate(daemons.path(segment_id), 0)
    memory.seal(segment_id, header())
    memory.clear(segment_id)
    memory.unlink(segment_id)
    assert daemons.entries() == []


def test_segment_that_somebody_unlinked_is_let_go_all_the_same(daemons: Daemons) -> None:
    memory = daemons.memory()
    segment_id, _ = memory.create(NBYTES)
    daemons.path(segment_id).unlink()
    memory.unlink(segment_id)
    assert memory.total_nbytes == 0


def test_entries_that_are_no_segments_are_passed_over(daemons: Daemons) -> None:
    segment_id = sealed(daemons)
    odd = [daemons.path(name) for name in ("1-1", "1-2", "1-3", "1-4", "../x", "zz", "1-5.tmp")]
    odd[0].mkdir()
    os.mkfifo(odd[1])
    odd[2].symlink_to("/etc/passwd")
    odd[3].write_bytes(MAGIC + bytes(5000))
    odd[5].touch()
    try:
        assert [found.id for found in daemons.memory().adopt()] == [segment_id]
    finally:
        if odd[0].exists():
            odd[0].rmdir()


def test_header_golden(daemons: Daemons) -> None:
    memory = Memory(daemons.namespace, bytes(32), Budget(), lock=False)
    segment_id, _ = memory.create(NBYTES)
    memory.seal(segment_id, {"step": 1})
    page = daemons.path(segment_id).read_bytes()[:43]
    memory.close()
    assert page[:16] == b"AWEXDSEG\x03\x00\x00\x00\x0a\x00\x00\x00"
    assert page[32:42] == b'{"step":1}'
    assert orjson.loads(page[32:42]) == {"step": 1}


def test_memory_that_cannot_be_locked_says_so_and_serves(daemons: Daemons) -> None:
    memory = Memory(daemons.namespace, daemons.key, Budget(), lock=True)
    _, locked = memory.create(NBYTES)
    assert locked == (not memory.lock_problem)
    memory.close()
    assert daemons.memory().lock_problem == "switched off"
