"""What is fetched while it is still written: its table comes last, and is compared with all that came before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from awexd.peers.cells import Cells
from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd_transports.base import Piece
from awexd_transports.errors import AwexdError
from awexd_transports.layout import Box
from awexd_transports.needs import needs
from awexd_transports.ranges import Ranges
from awexd_transports.registry import find
from tests.peers.nodes import SUBJECT, Node, Segment, sealed
from tests.peers.test_corruption_functional import WITHIN, MiB, flip, tensors
from tests.transports.strategies import manifest, one

__all__ = ["flip"]

Flip = Callable[..., int]


@pytest.fixture
def held() -> Iterator[Segment]:
    with sealed(tensors(), 1) as made:
        yield made


def early(into: Segment, came: Callable[[Piece], None], **more: object) -> Fetcher:
    settings = PeerSettings(piece_bytes=2 * MiB, retries=0)
    wants = {0: Ranges([(0, into.nbytes)])}
    given = {"wants": wants, "memories": {0: into.memory}, "cells": {0: Cells(tensors())}, "settings": settings}
    return Fetcher(find("tcp")(settings), SUBJECT, came=came, **given | more)  # type: ignore[arg-type]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN):
        while not true():  # noqa: ASYNC110 - nothing says so
            await asyncio.sleep(0.01)


class TestEarly:
    transport = "tcp"

    async def test_bytes_come_as_they_are_written_and_the_table_when_all_is(
        self, node: Callable[..., Node], segment: Callable[..., Segment], held: Segment
    ) -> None:
        table, into, came = Cells(tensors()).table, segment(held.nbytes), list[Piece]()
        source = node("a", {0: held}, offer=False)
        source.ask("offer", arrived={"0": [[0, 4 * MiB]]})
        fetch = early(into, came.append)
        running = asyncio.create_task(fetch.run([source.source()], WITHIN))
        await until(lambda: len(came) == 2)
        assert [(piece.offset, piece.end) for piece in came] == [(0, 2 * MiB), (2 * MiB, 4 * MiB)]
        assert (fetch.left, fetch.delivered["a"]) == (held.nbytes, 4 * MiB)
        source.ask("extend", rank=0, start=0, end=table[0])
        await until(lambda: fetch.delivered["a"] == table[0])
        await asyncio.sleep(0.3)
        assert not running.done()
        fetch.sealed()
        source.ask("extend", rank=0, start=0, end=held.nbytes)
        await running
        assert np.array_equal(into.copy(), held.copy())
        assert (fetch.left, fetch.again, fetch.delivered["a"]) == (0, 0, held.nbytes)

    async def test_table_that_is_there_first_is_compared_with_what_comes_after(
        self, node: Callable[..., Node], segment: Callable[..., Segment], held: Segment
    ) -> None:
        into = segment(held.nbytes)
        fetch = early(into, list[Piece]().append)
        fetch.sealed()
        await fetch.run([node("a", {0: held}).source()], WITHIN)
        assert np.array_equal(into.copy(), held.copy())
        assert (fetch.left, fetch.again) == (0, 0)

    @pytest.mark.parametrize("places", [[3 * MiB], [200, 3 * MiB + 5, 11 * MiB + 1]])
    async def test_bits_that_flip_before_the_table_is_there_are_seen_then(
        self, node: Callable[..., Node], segment: Callable[..., Segment], flip: Flip, held: Segment, places: list[int]
    ) -> None:
        into, came, table = segment(held.nbytes), list[Piece](), Cells(tensors()).table
        source = node("a", {0: held})
        fetch = early(into, came.append)
        sources = [source.source(port=flip(source.port, places, 1))]
        running = asyncio.create_task(fetch.run(sources, WITHIN))
        await until(lambda: sum(piece.nbytes for piece in came) >= table[0] or running.done())
        fetch.sealed()
        while not running.done() or running.exception():  # a frame's own header: its connection is given up
            try:
                await running
            except AwexdError:
                running = asyncio.create_task(fetch.run([source.source()], WITHIN))
        assert np.array_equal(into.copy(), held.copy())
        assert fetch.left == 0

    async def test_source_that_goes_costs_nothing_of_what_came(
        self, node: Callable[..., Node], segment: Callable[..., Segment], held: Segment
    ) -> None:
        into, came = segment(held.nbytes), list[Piece]()
        first, second = (node(name, {0: held}, offer=False) for name in "ab")
        first.ask("offer", arrived={"0": [[0, 6 * MiB]]})
        fetch = early(into, came.append)
        running = asyncio.create_task(fetch.run([first.source()], WITHIN))
        await until(lambda: len(came) == 3)
        first.ask("withdraw")
        with pytest.raises(AwexdError):
            await running
        second.ask("offer")
        fetch.sealed()
        await fetch.run([second.source()], WITHIN)
        assert np.array_equal(into.copy(), held.copy())
        assert dict(fetch.delivered) == {"a": 6 * MiB, "b": held.nbytes - 6 * MiB}

    async def test_rows_wait_for_the_table_too(
        self, node: Callable[..., Node], segment: Callable[..., Segment], flip: Flip, held: Segment
    ) -> None:
        of, into, came = tensors(), segment(held.nbytes), list[Piece]()
        reader = manifest(
            one("t0", (1000, 1024), Box((0, 0), (1000, 512))),
            one("t6", (300, 4096), Box((0, 2048), (300, 1024)), "float32"),
        )
        need = needs([of], [reader], [0]).ranks[0]
        rows = [Piece(0, *strip) for strip in need.strips]
        source, right = node("a", {0: held}), list[Piece]()
        fetch = early(into, came.append, wants={0: need.ranges}, rows={0: rows}, rows_arrived=right.append)
        running = asyncio.create_task(fetch.run([source.source(port=flip(source.port, [2 * MiB], 1))], WITHIN))
        await until(lambda: set(rows) <= set(came))
        assert right == []
        fetch.sealed()
        await running
        assert set(right) == set(rows)
        assert fetch.again > 0
        found, there = into.copy(), held.copy()
        for start, end in [run for piece in rows for run in piece.runs()]:
            assert np.array_equal(found[start:end], there[start:end])
