"""Which transport is used with which node: transports that do as they are told, and a clock that is set."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest

from awexd.nodes.routes import ABSENT_SECONDS, AGAIN_SECONDS, TRY_LANES, Routes
from awexd_transports.base import Admission, Capabilities, Lane, Memory, Piece, Server, Source, Subject
from awexd_transports.errors import AwexdError, DaemonUnavailable, VersionUnavailable

SUBJECT = Subject("me/grpo", 1, 1, 1)
PIECE = Piece(0, 0, 64 << 20)
GONE = DaemonUnavailable("the network is down")


class OneLane:
    depth, received = 1, 0

    def __init__(self, transport: Fake) -> None:
        self._transport = transport

    async def fetch(self, piece: Piece, memory: Memory, *, summed: bool) -> None:
        if self._transport.fails is not None:
            raise self._transport.fails

    async def close(self) -> None:
        return


class Fake:
    """``absent``: the peer does not serve by it. ``fails``: what its lanes raise."""

    name: ClassVar[str] = "fake"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self) -> None:
        self.absent, self.asked = False, 0
        self.fails: AwexdError | None = None

    def serve(self, host: str, port: int, admission: Admission) -> Server:
        raise NotImplementedError

    async def connect(self, source: Source, subject: Subject) -> Lane:
        self.asked += 1
        if self.absent:
            raise DaemonUnavailable("not by this", {"serves": []})
        return OneLane(self)


class Fast(Fake):
    name: ClassVar[str] = "fast"


class Slow(Fake):
    name: ClassVar[str] = "slow"


class Case:
    def __init__(self) -> None:
        self.fast, self.slow = Fast(), Slow()
        self.now = 0.0
        self.told: list[tuple[str, int]] = []
        self.routes = Routes([self.fast, self.slow], "", lambda *told: self.told.append(told), lambda: self.now)

    async def lane(self, node: str = "a") -> Lane:
        return await self.routes.connect(Source(node, "host", 1, b"", b""), SUBJECT)

    async def fetches(self, node: str = "a") -> None:
        lane = await self.lane(node)
        await lane.fetch(PIECE, memory=None, summed=False)  # type: ignore[arg-type]
        await lane.close()

    def used(self, node: str = "a") -> dict[str, Any]:
        return next(row for row in self.routes.status() if row["node"] == node)

    def rates(self, **rates: float) -> None:
        for name, rate in rates.items():
            self.routes.moved(self.routes._links["a"], name, rate)


@pytest.fixture
def case() -> Case:
    return Case()


async def test_preferred_one_is_used_and_measured(case: Case) -> None:
    assert case.routes.status() == []
    assert case.routes.name == "fast"
    await case.fetches()
    row = case.used()
    assert (row["transport"], row["why"]) == ("fast", "the fastest that both nodes can do")
    assert row["bytes_per_second"] > 0
    assert not case.told


async def test_one_that_fails_is_left_with_one_warning_and_used_again_later(case: Case) -> None:
    case.fast.fails = GONE
    with pytest.raises(DaemonUnavailable):
        await case.fetches()
    assert case.told == []  # the node may be down: nothing is known yet
    await case.fetches()
    await case.fetches()
    assert case.told == [("node a by slow from now on: fast failed: the network is down", logging.WARNING)]
    assert case.used()["why"] == "fast failed: the network is down"
    case.now = AGAIN_SECONDS[0] + 1
    with pytest.raises(DaemonUnavailable):
        await case.fetches()
    case.now += AGAIN_SECONDS[0] + 1  # twice as long now
    await case.fetches()
    assert case.used()["transport"] == "slow"
    case.fast.fails = None
    case.now += AGAIN_SECONDS[0]
    await case.fetches()
    assert case.used()["transport"] == "fast"
    assert case.told[-1] == ("node a by fast again", logging.INFO)
    assert [level for _, level in case.told].count(logging.WARNING) == 2


async def test_fault_with_one_node_is_no_other_nodes(case: Case) -> None:
    case.fast.fails = GONE
    with pytest.raises(DaemonUnavailable):
        await case.fetches("a")
    await case.fetches("a")
    case.fast.fails = None
    await case.fetches("b")
    assert (case.used("a")["transport"], case.used("b")["transport"]) == ("slow", "fast")
    assert case.routes.name == "fast, slow"


async def test_version_that_is_gone_is_no_fault_of_the_transport(case: Case) -> None:
    case.fast.fails = VersionUnavailable("withdrawn")
    with pytest.raises(VersionUnavailable):
        await case.fetches()
    case.fast.fails = None
    await case.fetches()
    assert case.used()["transport"] == "fast"


async def test_lane_that_is_closed_here_is_no_fault(case: Case) -> None:
    lane = await case.lane()
    await lane.close()
    case.fast.fails = GONE
    with pytest.raises(DaemonUnavailable):
        await lane.fetch(PIECE, memory=None, summed=False)  # type: ignore[arg-type]
    await case.lane()
    assert case.used()["transport"] == "fast"


async def test_last_one_is_never_left(case: Case) -> None:
    case.fast.fails = case.slow.fails = GONE
    for _ in range(5):
        with pytest.raises(DaemonUnavailable):
            await case.fetches()
    assert case.used()["transport"] == "slow"


async def test_node_that_does_not_serve_by_it_is_asked_seldom_and_nobody_is_warned(case: Case) -> None:
    case.fast.absent = True
    for _ in range(3):
        await case.fetches()
    assert case.fast.asked == 1
    assert case.used()["why"] == "node a does not serve by fast"
    case.fast.absent, case.now = False, ABSENT_SECONDS + 1
    await case.fetches()
    assert case.used()["transport"] == "fast"
    assert not [text for text, level in case.told if level == logging.WARNING]


async def test_only_one_that_is_not_served_is_an_error() -> None:
    alone = Fast()
    alone.absent = True
    routes = Routes([alone], "as it is set", lambda text, level: None)
    with pytest.raises(DaemonUnavailable, match="not by this"):
        await routes.connect(Source("a", "host", 1, b"", b""), SUBJECT)


async def test_measured_rate_decides(case: Case) -> None:
    await case.lane()
    case.rates(fast=3e9, slow=3.5e9)  # not much faster
    await case.lane()
    assert case.used()["transport"] == "fast"
    case.rates(slow=4e9)
    await case.lane()
    assert (case.used()["transport"], case.used()["why"]) == ("slow", "was faster than fast")


@pytest.mark.parametrize(("fast", "slow", "tried"), [(5e9, None, 0), (1e9, None, 1), (4e9, 1e9, 0), (4e9, 3e9, 1)])
async def test_other_one_is_tried_now_and_then_where_that_is_cheap(
    case: Case, fast: float, slow: float | None, tried: int
) -> None:
    await case.lane()
    case.rates(**{"fast": fast} | ({"slow": slow} if slow else {}))
    for _ in range(TRY_LANES):
        await case.lane()
    assert case.slow.asked == tried
