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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from awexd_transports.cuda import driver as cuda
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import IntegrityError, InvalidArgument, VersionUnavailable
from awexd_transports.layout import Manifest
from awexd_transports.segment import CHECKSUM_BYTES, first_cells
from awexd_transports.view import View

MAGIC = b"AWEXDLNT"
_HEADER = struct.Struct("<8sQQ")
"""The magic; bytes of the JSON; where the table begins."""
_ALIGN = 4096
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
    """One allocation of the owner's. ``base``: its address there."""

    uuid: str
    nbytes: int
    handle: str
    base: int


def describe(views: Sequence[View], names: Sequence[str]) -> tuple[list[str], bytes]:
    """Where these views lie, in pieces' order: the UUIDs of their devices, and the JSON of a description.

    Each allocation is named once, however many tensors lie in it.

    Raises:
        NotLendable: one lies elsewhere than in a device's memory, or its allocation has no handle.
    """
    driver = cuda.driver
    uuids = driver.devices()
    numbers: dict[tuple[int, int], int] = {}
    allocations: list[Allocation] = []
    pieces: list[list[Any]] = []
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
            except cuda.DriverError as error:
                raise NotLendable(
                    f"{name} is in memory that CUDA IPC cannot share ({error}): that of an allocator with virtual "
                    "memory, such as expandable_segments or torch_memory_saver"
                ) from error
            allocations.append(Allocation(uuids[device], nbytes, handle, base))
        pieces.append([at, view.address - base, list(view.strides)])
    body = {
        "process": _process.name,
        "allocations": [[one.uuid, one.nbytes, one.handle, one.base] for one in allocations],
        "pieces": pieces,
    }
    return sorted({one.uuid for one in allocations}), orjson.dumps(body)


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

    Raises:
        IntegrityError: it does not describe these pieces.
        VersionUnavailable: CUDA does not open it here.
    """

    sealed = False
    """No header of the daemon's says that it is good: an update is over when the daemon has confirmed it."""

    def __init__(self, fd: int, nbytes: int, manifest: Manifest) -> None:
        self._driver = cuda.driver
        self._opened: list[tuple[int, int]] = []
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
        for device, address in self._opened:
            self._driver.close(device, address)
        self._opened.clear()
        self._description.close()

    def _open(self, process: str) -> list[tuple[int, int]]:
        """The device and address of each allocation, here."""
        ordinals = {uuid: at for at, uuid in enumerate(self._driver.devices())}
        bases = []
        for one in self._allocations:
            if one.uuid not in ordinals:
                raise VersionUnavailable(f"weights are lent on {one.uuid}, which this process does not see")
            device = ordinals[one.uuid]
            if process == _process.name:
                bases.append((device, one.base))
                continue
            try:
                address = self._driver.open(device, bytes.fromhex(one.handle))
            except cuda.DriverError as error:
                raise VersionUnavailable(
                    f'lent GPU memory cannot be opened here ({error}): pass mode="host" to this reader or to the writer'
                ) from error
            self._opened.append((device, address))
            bases.append((device, address))
        return bases


def _checked(body: Any, manifest: Manifest) -> tuple[list[Allocation], list[tuple[int, int, tuple[int, ...]]]]:
    """Allocations and pieces of a description, every piece inside its allocation.

    Raises:
        IntegrityError: they are not what the manifest says.
    """
    try:
        allocations = [
            Allocation(str(uuid), int(size), str(handle), int(base)) for uuid, size, handle, base in body["allocations"]
        ]
        pieces = [(int(at), int(offset), tuple(map(int, strides))) for at, offset, strides in body["pieces"]]
        if len(pieces) != len(manifest.pieces) or not isinstance(body["process"], str):
            raise ValueError(f"{len(pieces)} pieces where the manifest has {len(manifest.pieces)}")
        for entry, (at, offset, strides) in zip(manifest.pieces, pieces, strict=True):
            steps = [(n - 1) * step for n, step in zip(entry.box.shape, strides, strict=True)]
            last = offset + sum(steps) + ITEMSIZE[entry.tensor.dtype]
            inside = 0 <= at < len(allocations) and offset >= 0 and all(step >= 0 for step in strides)
            if (entry.box.numel or at != NOWHERE) and (not inside or last > allocations[at].nbytes):
                raise ValueError(f"{entry.tensor.name} is not inside its allocation")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IntegrityError(f"a description of lent memory that does not fit its manifest: {error}") from error
    return allocations, pieces
