"""Sidecars by themselves: what they are asked, what they refuse, and that nothing is written after their death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from awexd.rdma.agent import Agent, Region
from awexd.rdma.child import TransferFailed
from tests.peers.nodes import FILL, Segment
from tests.peers.rdma import needs_nixl, sidecar

__all__ = ["sidecar"]
pytestmark = [needs_nixl, pytest.mark.usefixtures("sidecar")]
MiB = 1 << 20
SegmentMaker = Callable[..., Segment]


@pytest.fixture
def agents() -> Iterator[tuple[Agent, Agent]]:
    """A source's and a target's."""
    with ExitStack() as stack:
        made = Agent("source"), Agent("target")
        for agent in made:
            stack.enter_context(agent.held())
            agent.child()
        yield made


async def introduced(source: Agent, target: Agent, held: Segment, into: Segment) -> tuple[Region, Region, str]:
    there, here = await asyncio.gather(source.region(held.memory), target.region(into.memory))
    name = (await there.child.call("attach", metadata=here.metadata.hex()))["agent"]
    return there, here, name


async def test_rows_are_written_where_they_belong_and_nothing_between_them(
    agents: tuple[Agent, Agent], segment: SegmentMaker
) -> None:
    held, into = segment(64 * MiB, 1), segment(64 * MiB)
    there, here, name = await introduced(*agents, held, into)
    here.child.expect(1)
    for run, stride, rows in ((1000, 5000, 13_000), (9 * MiB, 10 * MiB, 6), (1, 2, 5)):
        into.fill(FILL)
        shape: dict[str, Any] = {"rows": rows, "run": run, "stride": stride, "nbytes": rows * run}
        where: dict[str, Any] = {"key": there.key, "offset": 7, "agent": name, "address": here.address + 7}
        await there.child.call("put", within=60.0, **where, **shape)
        wanted = np.full(into.nbytes, FILL, np.uint8)
        with held.bytes() as source:
            for start in range(7, 7 + rows * stride, stride):
                wanted[start : start + run] = source[start : start + run]
        assert np.array_equal(into.copy(), wanted)


async def test_what_cannot_be_is_refused_and_harms_nothing(agents: tuple[Agent, Agent], segment: SegmentMaker) -> None:
    held, into = segment(MiB, 1), segment(MiB)
    there, here, name = await introduced(*agents, held, into)
    good: dict[str, Any] = {"key": there.key, "offset": 0, "nbytes": 1000, "agent": name, "address": here.address}
    wrong: list[dict[str, Any]] = [
        {"offset": MiB},
        {"offset": -1},
        {"nbytes": MiB + 1},
        {"key": 99},
        {"agent": "nobody"},
        {"address": here.address - 4096},
        {"address": here.address + MiB - 1},
        {"address": 0},
        {"rows": 2, "run": 600, "stride": 1000},
        {"rows": 2, "run": 500, "stride": MiB},
        {"rows": -1},
    ]
    for changes in wrong:
        with pytest.raises(TransferFailed):
            await there.child.call("put", **good | changes)
    for metadata in ("", "00" * 300, here.metadata.hex()[:100], "zz"):
        with pytest.raises(TransferFailed):
            await there.child.call("attach", metadata=metadata)
    with pytest.raises(TransferFailed):
        await there.child.call("nothing")
    assert (into.copy() == FILL).all()
    await there.child.call("put", **good)
    assert np.array_equal(into.copy()[:1000], held.copy()[:1000])


@pytest.mark.parametrize("frozen", [False, True])
async def test_after_the_target_s_sidecar_is_dead_nothing_is_written(
    agents: tuple[Agent, Agent], segment: SegmentMaker, frozen: bool
) -> None:
    held, into = segment(256 * MiB, 1), segment(256 * MiB)
    there, here, name = await introduced(*agents, held, into)
    begun = asyncio.Event()
    put = asyncio.create_task(
        there.child.call(
            "put",
            within=None,
            progress=lambda at: begun.set(),
            key=there.key,
            offset=0,
            nbytes=held.nbytes,
            agent=name,
            address=here.address,
        )
    )
    await begun.wait()
    if frozen:
        os.kill(there.child.pid, signal.SIGSTOP)  # what it has sent already is in the kernel's buffers
    await here.child.kill()
    into.fill(FILL)
    if frozen:
        os.kill(there.child.pid, signal.SIGCONT)
    with pytest.raises(TransferFailed):
        await put
    assert (into.copy() == FILL).all()
    again = await agents[1].region(into.memory)
    assert again.child.name != here.child.name
    assert there.child.alive


async def test_memory_that_is_closed_is_mapped_no_more(agents: tuple[Agent, Agent]) -> None:
    source, target = agents
    with Segment(MiB, 1) as held, Segment(MiB) as into:
        there, here, _ = await introduced(source, target, held, into)
        assert all(_maps(region) for region in (there, here))
    for region in (there, here):
        with pytest.raises(TransferFailed):  # in its turn, after it was unmapped
            await region.child.call("describe", key=region.key)
        assert not _maps(region)
        assert region.child.alive


def _maps(region: Region) -> bool:
    with open(f"/proc/{region.child.pid}/maps") as maps:
        return "memfd:awexd-test" in maps.read()


async def test_sidecar_that_is_stuck_is_killed_and_replaced(agents: tuple[Agent, Agent], segment: SegmentMaker) -> None:
    held = segment(MiB, 1)
    source = agents[0]
    region = await source.region(held.memory)
    os.kill(region.child.pid, signal.SIGSTOP)
    with pytest.raises(TransferFailed, match="did not answer describe in time"):
        await region.child.call("describe", within=0.2, key=region.key)
    assert not region.child.alive
    assert (await source.region(held.memory)).child.alive


async def test_one_that_cannot_start_says_why(segment: SegmentMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nothing")
    agent = Agent("source")
    with agent.held(), pytest.raises(TransferFailed, match="rdma sidecar"):
        await agent.region(segment(MiB, 1).memory)
