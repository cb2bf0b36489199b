"""Memory of a process that others on its node may read in place: how it is described, declared and opened.

The description is a memfd of one rank: a header, JSON (allocations with their CUDA handles, and where each piece of the
rank's segment manifest lies in them), and a table with one checksum a cell, filled anew for each version. Its size is
sealed; its owner alone has it mapped for writing.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import orjson

from awexd_transports.cuda import driver as cuda
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import IntegrityError, InvalidArgument, VersionUnavailable
from awexd_transports.layout import Manifest
from awexd_transports.segment import CHECKSUM_BYTES, WORDS_AT, first_cells
from awexd_transports.view import View

MAGIC = b"AWEXDLNT"
_HEADER = struct.Struct("<8sQQ32x")
"""The magic; bytes of the JSON; where the table begins; then the words of ``Words``."""
_ALIGN = 4096
Fetch = Callable[[int, int], list[int]]
NOWHERE = -1
"""In the place of an allocation's number: a piece without elements."""


class _Process:
    """Names this process: its own memory needs no opening. A forked child is another."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.name = secrets.token_hex(16)


_process = _Process()


class NotLendable(InvalidArgument):
    """Memory that no other process can be given; says which and why."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the owner's.

    Attributes:
        handle: in hexadecimal; empty for virtual memory.
        base: its address there.
        chunks: bytes of each physical allocation in it, if it is virtual.
    """

    uuid: str
    nbytes: int
    handle: str
    base: int
    chunks: tuple[int, ...] = ()


class Described(NamedTuple):
    """What is written into a description.

    Attributes:
        uuids: of the devices.
        body: JSON.
        chunks: of virtual memory, by number: the device, and the address of each.
    """

    uuids: list[str]
    body: bytes
    chunks: list[tuple[int, int]]


def describe(views: Sequence[View], names: Sequence[str]) -> Described:
    """Where these views lie, in pieces' order.

    Each allocation is named once, however many tensors lie in it.

    Raises:
        NotLendable: one lies elsewhere than in a device's memory, or in memory that cannot be shared.
    """
    driver = cuda.driver
    uuids = driver.devices()
    numbers: dict[tuple[int, int], int] = {}
    allocations: list[Allocation] = []
    pieces: list[list[Any]] = []
    virtual: dict[int, list[int]] = defaultdict(list)
    for view, name in zip(views, names, strict=True):
        if not view.numel:
            pieces.append([NOWHERE, 0, list(view.strides)])
            continue
        device = driver.device_of(view)
        if device is None:
            raise NotLendable(f"{name} is in host memory: only weights on a GPU can be lent")
        base, nbytes = driver.allocation(view)
        at = numbers.setdefault((device, base), len(allocations))
        if at == len(allocations):
            try:
                handle = driver.handle(device, base).hex()
            except cuda.DriverError:
                numbers[device, base] = NOWHERE
            else:
                allocations.append(Allocation(uuids[device], nbytes, handle, base))
        if numbers[device, base] == NOWHERE:
            virtual[device].append(len(pieces))
        pieces.append([numbers[device, base], view.address - base, list(view.strides)])
    chunks: list[tuple[int, int]] = []
    for device, found in virtual.items():
        spans = _spans(device, [(views[number], names[number]) for number in found])
        starts = [start for start, _ in spans]
        first = len(allocations)
        for start, sizes in spans:
            allocations.append(Allocation(uuids[device], sum(sizes), "", start, sizes))
            chunks += [(device, at) for at in accumulate(sizes[:-1], initial=start)]
        for number in found:
            at = bisect_right(starts, views[number].address) - 1
            pieces[number][:2] = first + at, views[number].address - starts[at]
    body = {
        "process": _process.name,
        "allocations": [[one.uuid, one.nbytes, one.handle, one.base, one.chunks] for one in allocations],
        "pieces": pieces,
    }
    return Described(sorted({one.uuid for one in allocations}), orjson.dumps(body), chunks)


def _spans(device: int, views: Sequence[tuple[View, str]]) -> list[tuple[int, tuple[int, ...]]]:
    """Address and chunks of each stretch of virtual memory that these views lie in, in order.

    Raises:
        NotLendable: its chunks cannot be exported.
    """
    driver = cuda.driver
    found: dict[int, int] = {}
    for view, name in sorted(views, key=lambda one: one[0].address):
        end = view.address + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        try:
            for at, size in driver.chunks(device, view.address, end + view.itemsize):
                if at not in found:
                    os.close(driver.export(device, at))
                    found[at] = size
        except cuda.DriverError as error:
            raise NotLendable(
                f"{name} is in memory that CUDA cannot share ({error}): of an allocator with virtual memory, such as "
                "expandable_segments or torch_memory_saver, that was not told to make it shareable"
            ) from error
    spans: list[tuple[int, tuple[int, ...]]] = []
    for at in sorted(found):
        if spans and spans[-1][0] + sum(spans[-1][1]) == at:
            spans[-1] = spans[-1][0], (*spans[-1][1], found[at])
        else:
            spans.append((at, (found[at],)))
    return spans


class Words:
    """What becomes of a step, for readers to see without asking: each word has the number of a step, plus one.

    Of an attempt that was given up and made again the words are the same: readers of the former have lost their lease.

    Attributes (as far as they have come):
        OFFERED: it is being lent.
        LOOKED: every tensor is where it was declared: readers may begin.
        SETTLED: and is as it was declared: what they have copied is good.
        WITHDRAWN: the daemon's, at somebody's command: no longer.
    """

    OFFERED, LOOKED, SETTLED, WITHDRAWN = range(4)

    def __init__(self, words: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        self._words = words

    def say(self, word: int, step: int) -> None:
        self._words[word] = step + 1

    def take_back(self) -> None:
        """By the owner: nothing is lent."""
        self._words[: Words.WITHDRAWN] = 0

    def is_so(self, word: int, step: int) -> bool:
        return bool(self._words[word] == step + 1)

    def lasts(self, step: int) -> bool:
        """It is still lent."""
        return self.is_so(Words.OFFERED, step) and not self.is_so(Words.WITHDRAWN, step)

    def close(self) -> None:
        """Lets the memory go that they are in, whoever still has these; nothing is so any more."""
        self._words = np.zeros(4, np.uint64)


class Description:
    """A mapped description, of one's own memory or of another's; ``close`` ends the mapping."""

    def __init__(self, fd: int, nbytes: int, manifest: Manifest, *, writable: bool) -> None:
        if os.fstat(fd).st_size != nbytes:
            raise IntegrityError(f"a description of {os.fstat(fd).st_size} bytes where {nbytes} were promised")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self._bytes.ctypes.data
        self.words = Words(np.frombuffer(self._map, np.uint64, 4, WORDS_AT))
        self.table_at: int = _HEADER.unpack_from(self._map)[2]
        if self.table_at + CHECKSUM_BYTES * first_cells(manifest)[-1] > nbytes:
            raise IntegrityError("a description of other pieces than the manifest's")

    def body(self) -> Any:
        """Its JSON, as yet unchecked.

        Raises:
            IntegrityError: it is none.
        """
        magic, length, table_at = _HEADER.unpack_from(self._map)
        if magic != MAGIC or _HEADER.size + length > table_at:
            raise IntegrityError("not a description of lent memory")
        try:
            return orjson.loads(self._map[_HEADER.size : _HEADER.size + length])
        except orjson.JSONDecodeError as error:
            raise IntegrityError(f"a description of lent memory that is not JSON: {error}") from error

    def table(self, manifest: Manifest) -> int:
        """The address of the table of checksums."""
        return self.address + self.table_at

    @property
    def closed(self) -> bool:
        return self._bytes is None

    def close(self) -> None:
        self._bytes = None
        self.words.close()  # an error on its way may keep them
        self._map.close()


def size_of(body: bytes, manifest: Manifest) -> tuple[int, int]:
    """Where the table of a description begins, and the bytes of all of it."""
    table_at = -(-(_HEADER.size + len(body)) // _ALIGN) * _ALIGN
    return table_at, table_at + max(_ALIGN, CHECKSUM_BYTES * first_cells(manifest)[-1])


def write_description(fd: int, body: bytes, table_at: int) -> None:
    os.pwrite(fd, _HEADER.pack(MAGIC, len(body), table_at) + body, 0)


class Opened:
    """Another process's memory, opened once; ``close`` ends that, when nothing reads there any more.

    Args:
        fd: of its description, which stays the caller's.
        manifest: of the pieces that are described.
        fetch: gives descriptors of so many of its chunks from that number on, which are the caller's then.
        device: the one that will read, which so sees peers' memory as its own, without a context of this process on
            them; None: each allocation is opened for the one that it is on.

    Raises:
        IntegrityError: it does not describe these pieces.
        VersionUnavailable: CUDA does not open it here.
    """

    def __init__(self, fd: int, nbytes: int, manifest: Manifest, fetch: Fetch, *, device: int | None = None) -> None:
        self._driver = cuda.driver
        self._fetch = fetch
        self._device = device
        self._opened: list[tuple[int, int, tuple[int, ...]]] = []
        self._description = Description(fd, nbytes, manifest, writable=False)
        try:
            body = self._description.body()
            self._allocations, self._pieces = _checked(body, manifest)
            self._bases = self._open(body["process"])
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._description.closed

    @property
    def words(self) -> Words:
        return self._description.words

    def piece(self, manifest: Manifest, number: int) -> View:
        """Where that piece lies."""
        entry = manifest.pieces[number]
        at, offset, strides = self._pieces[number]
        if at == NOWHERE:
            return View(0, entry.box.shape, strides, entry.tensor.dtype, self)
        device, base = self._bases[at]
        return self._driver.view(device, base + offset, entry.box.shape, strides, entry.tensor.dtype, self)

    def table(self, manifest: Manifest) -> int:
        """The address of the table of checksums."""
        return self._description.table(manifest)

    def pin(self) -> None:
        """Nothing of it is in host memory."""

    def close(self) -> None:
        for device, address, chunks in self._opened:
            if chunks:
                self._driver.close_chunks(device, address, chunks)
            else:
                self._driver.close(device, address)
        self._opened.clear()
        self._description.close()

    def _open(self, process: str) -> list[tuple[int, int]]:
        """The device and address of each allocation, here."""
        ordinals = {uuid: at for at, uuid in enumerate(self._driver.devices())}
        bases = []
        number = 0
        for one in self._allocations:
            if one.uuid not in ordinals:
                raise VersionUnavailable(f"weights are lent on {one.uuid}, which this process does not see")
            device = ordinals[one.uuid]
            if process == _process.name:
                bases.append((device, one.base))
                continue
            device = device if self._device is None else self._device
            try:
                if one.chunks:
                    address = self._open_chunks(device, number, one.chunks)
                    number += len(one.chunks)
                else:
                    address = self._driver.open(device, bytes.fromhex(one.handle))
            except cuda.DriverError as error:
                raise VersionUnavailable(
                    f'lent GPU memory cannot be opened here ({error}): pass mode="host" to this reader or to the writer'
                ) from error
            self._opened.append((device, address, one.chunks))
            bases.append((device, address))
        return bases

    def _open_chunks(self, device: int, first: int, chunks: tuple[int, ...]) -> int:
        fds = self._fetch(first, len(chunks))
        try:
            return self._driver.open_chunks(device, chunks, fds)
        finally:
            for fd in fds:
                os.close(fd)


def _checked(body: Any, manifest: Manifest) -> tuple[list[Allocation], list[tuple[int, int, tuple[int, ...]]]]:
    """Allocations and pieces of a description, every piece inside its allocation.

    Raises:
        IntegrityError: they are not what the manifest says.
    """
    try:
        allocations = [
            Allocation(_text(uuid), _whole(size), _text(handle), _whole(base), tuple(map(_whole, _list(chunks))))
            for uuid, size, handle, base, chunks in _list(body["allocations"])
        ]
        pieces = [
            (_whole(at), _whole(offset), tuple(map(_whole, _list(strides))))
            for at, offset, strides in _list(body["pieces"])
        ]
        _text(body["process"])
        if len(pieces) != len(manifest.pieces):
            raise ValueError(f"{len(pieces)} pieces where the manifest has {len(manifest.pieces)}")
        for one in allocations:
            if one.chunks and (min(one.chunks) <= 0 or sum(one.chunks) != one.nbytes):
                raise ValueError("chunks that do not add up")
        for entry, (at, offset, strides) in zip(manifest.pieces, pieces, strict=True):
            steps = [(n - 1) * step for n, step in zip(entry.box.shape, strides, strict=True)]
            last = offset + sum(steps) + ITEMSIZE[entry.tensor.dtype]
            inside = 0 <= at < len(allocations) and offset >= 0 and all(step >= 0 for step in strides)
            if (entry.box.numel or at != NOWHERE) and (not inside or last > allocations[at].nbytes):
                raise ValueError(f"{entry.tensor.name} is not inside its allocation")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IntegrityError(f"a description of lent memory that does not fit its manifest: {error}") from error
    return allocations, pieces


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{value!r} is no list")
    return value
