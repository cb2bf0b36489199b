"""Descriptions of lent memory: whatever one says, nothing outside the allocations that it names is ever read."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from awexd.manifests import lasting_memfd
from awexd_transports.cuda import driver as cuda
from awexd_transports.cuda.lent import (
    NotLendable,
    Opened,
    Words,
    describe,
    size_of,
    write_description,
)
from awexd_transports.errors import IntegrityError, VersionUnavailable
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.view import View
from tests.devices import SharedMemoryDriver

SHAPES = {"a": (6, 4), "b": (3,), "empty": (0, 4)}


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[SharedMemoryDriver]:
    before = cuda.driver
    made = SharedMemoryDriver(tmp_path).install()
    yield made
    made.allocations.clear()
    cuda.driver = before


def manifest() -> Manifest:
    specs = (TensorSpec(name, shape, "float32") for name, shape in SHAPES.items())
    return Manifest.of([Entry(spec, Box((0,) * len(spec.shape), spec.shape), at) for at, spec in enumerate(specs)])


def views(gpu: SharedMemoryDriver) -> tuple[View, ...]:
    full = gpu.tensors({name: torch.arange(48.0).view(6, 8) for name in ("a", "b")})
    return View.of(full["a"][:, 2:6]), View.of(full["b"][0, :3]), View.of(torch.empty(0, 4))


def opened(body: bytes, *, other: Manifest | None = None, nbytes: int | None = None) -> Opened:
    known = manifest()
    table_at, size = size_of(body, known)
    fd = lasting_memfd("t", size)
    try:
        write_description(fd, body, table_at)
        return Opened(fd, nbytes or size, other or known, lambda *_: [])
    finally:
        os.close(fd)


def test_pieces_are_where_they_lie(gpu: SharedMemoryDriver) -> None:
    lent = views(gpu)
    described = describe(lent, list(SHAPES))
    found = opened(described.body)
    assert described.uuids == ["GPU-0"]
    assert [found.piece(manifest(), at).shape for at in range(3)] == list(SHAPES.values())
    for at in range(2):
        assert found.piece(manifest(), at).tensor().tolist() == lent[at].tensor().tolist()
    found.close()
    assert found.closed


def test_another_process_opens_each_allocation_once(gpu: SharedMemoryDriver) -> None:
    lent = views(gpu)
    body = orjson.loads(describe(lent, list(SHAPES)).body)
    found = opened(orjson.dumps(body | {"process": "another"}))
    assert len(body["allocations"]) == len(gpu.opened) == 1
    piece = found.piece(manifest(), 0)
    assert piece.address != lent[0].address
    assert piece.tensor().tolist() == lent[0].tensor().tolist()
    found.close()
    assert gpu.opened == {}


Spoil = Callable[[dict[str, Any]], None]


def spoiled(path: list[Any], value: Any) -> Spoil:
    def spoil(body: dict[str, Any]) -> None:
        at: Any = body
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        spoiled(["pieces", 0, 1], 1 << 40),
        spoiled(["pieces", 0, 1], -4),
        spoiled(["pieces", 0, 0], 1),
        spoiled(["pieces", 0, 0], -1),
        spoiled(["pieces", 0, 0], -2),
        spoiled(["pieces", 0, 2], [1 << 40, 4]),
        spoiled(["pieces", 0, 2], [-32, 4]),
        spoiled(["pieces", 0, 2], [32]),
        spoiled(["pieces", 0, 2], "32"),
        spoiled(["pieces", 0], []),
        spoiled(["pieces"], []),
        spoiled(["pieces"], None),
        spoiled(["allocations"], []),
        spoiled(["allocations", 0, 1], 8),
        spoiled(["allocations", 0, 4], [1, 2]),
        spoiled(["allocations", 0, 4], [-1]),
        spoiled(["allocations", 0], ["GPU-0"]),
        spoiled(["process"], 7),
        lambda body: body.pop("pieces"),
    ],
)
def test_description_that_does_not_fit_is_refused_before_anything_is_opened(
    gpu: SharedMemoryDriver, spoil: Spoil
) -> None:
    body = copy.deepcopy(orjson.loads(describe(views(gpu), list(SHAPES)).body)) | {"process": "another"}
    spoil(body)
    with pytest.raises(IntegrityError):
        opened(orjson.dumps(body))
    assert gpu.opened == {}


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b"\x00" * 100])
def test_what_is_no_description(gpu: SharedMemoryDriver, body: bytes) -> None:
    with pytest.raises(IntegrityError):
        opened(body)


def test_description_of_another_manifest_or_size(gpu: SharedMemoryDriver) -> None:
    body = describe(views(gpu), list(SHAPES)).body
    spec = TensorSpec("a", (3 << 20,), "float32")
    larger = Manifest.of([Entry(TensorSpec(f"a{n}", *_rest(spec)), Box((0,), spec.shape), n) for n in range(400)])
    with pytest.raises(IntegrityError, match="other pieces"):
        opened(body, other=larger)
    with pytest.raises(IntegrityError, match="were promised"):
        opened(body, nbytes=1 << 20)


def _rest(spec: TensorSpec) -> tuple[tuple[int, ...], str]:
    return spec.shape, spec.dtype


def test_gpu_that_this_process_does_not_see_is_named(gpu: SharedMemoryDriver) -> None:
    body = describe(views(gpu), list(SHAPES)).body
    gpu.uuids = ["GPU-1"]
    with pytest.raises(VersionUnavailable, match="GPU-0"):
        opened(body)


def test_allocation_that_cannot_be_opened_leaves_none_open(gpu: SharedMemoryDriver) -> None:
    lent = (*views(gpu)[:1], *views(gpu)[1:])  # two allocations
    body = orjson.loads(describe(lent, list(SHAPES)).body) | {"process": "another"}
    assert len(body["allocations"]) == 2
    real = gpu.open

    def once(device: int, handle: bytes) -> int:
        if gpu.opened:
            raise cuda.DriverError("open: CUDA_ERROR_ALREADY_MAPPED")
        return real(device, handle)

    gpu.open = once  # type: ignore[method-assign]
    with pytest.raises(VersionUnavailable, match=r'ALREADY_MAPPED.*mode="host"'):
        opened(orjson.dumps(body))
    assert gpu.opened == {}


def test_host_memory_is_named(gpu: SharedMemoryDriver) -> None:
    with pytest.raises(NotLendable, match="b is in host memory"):
        describe((views(gpu)[0], View.of(torch.zeros(3))), ["a", "b"])


def test_words_tell_how_far_a_step_is(gpu: SharedMemoryDriver) -> None:
    body = describe(views(gpu), list(SHAPES)).body
    words = opened(body).words
    assert not words.lasts(0), "nothing was ever offered"
    words = Words(torch.zeros(4, dtype=torch.uint64).numpy())
    words.say(Words.OFFERED, 5)
    assert words.lasts(5)
    assert not words.lasts(4)
    assert not words.is_so(Words.LOOKED, 5)
    words.say(Words.WITHDRAWN, 5)
    assert not words.lasts(5)
    words.say(Words.OFFERED, 6)
    assert words.lasts(6), "what was withdrawn was another step"
    words.take_back()
    assert not words.lasts(6)
