"""One step's weights from a trainer's GPUs to all engines' GPUs, piece by piece, in simulated time.

What happens is what the daemons do (docs/nodes.md): ranks copy their segments into host memory and seal; when all
have, the MetaServer commits, and tells the engines' nodes; each asks for tickets, and fetches what its workers need
from nodes that have it, or that began to fetch the same before it, which serve on what has come; once all of an
engine's nodes have all, its workers copy it into their GPUs. ``Options`` leave out these barriers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from awexd.peers.tcp import TcpLane
from awexd_transports.names import Ints
from benchmarks.simulation.hardware import GPUS, Hardware
from benchmarks.simulation.links import Clock, Hops, Links, Queue
from benchmarks.simulation.needs import Needs
from benchmarks.simulation.sources import choose

DMA_BYTES = 64 << 20
"""In which a GPU's copies are simulated."""
IN, OUT, GPU = range(3)
"""Whose bytes pass a node's host memory: written by NICs, read by them, and either by GPUs."""
DEPTH = TcpLane.depth
"""Pieces that a lane asks for at once."""


@dataclass(frozen=True)
class Options:
    """How an update goes.

    Attributes:
        early: nodes fetch what ranks have copied into host memory: nothing waits for a seal or a commit.
        eager: what is on a node goes into its GPUs at once: nothing waits for the rest of the version.
        relayed: who began to fetch serves those that begin after it.
    """

    early: bool = False
    eager: bool = False
    relayed: bool = True


@dataclass
class Outcome:
    """Seconds from ``publish``: until all is sealed and committed, each node has all, each engine is done.

    Attributes:
        pauses: of each engine, seconds during which its GPUs are written to.
        sent, received: bytes over each node's NICs; of the trainer's nodes, and of the engines'.
        memory: bytes through each engine node's host memory.
        requests: that the MetaServer answered.
    """

    committed: float = 0.0
    fetched: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    relayed: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    requests: int = 0

    @property
    def seconds(self) -> float:
        return max(self.done)


def simulate(
    hardware: Hardware, segments: Sequence[int], nodes: Sequence[Needs], engines: int, options: Options | None = None
) -> Outcome:
    """One update of all engines.

    Args:
        segments: bytes that each writer rank publishes.
        nodes: what each node of one engine needs; the engines are alike.
    """
    return _Update(hardware, segments, nodes, engines, options or Options()).run()


class _Node:
    """A node's links; its daemon takes pieces in turn."""

    def __init__(self, name: str, clock: Clock, links: Links, hardware: Hardware) -> None:
        self.name = name
        self.memory = links.add(hardware.memory, classes=3)
        self.sends, self.receives = links.add(hardware.nic), links.add(hardware.nic)
        self.daemon = Queue(hardware.piece)


class _Holder(Protocol):
    node: _Node

    def has(self, needs: Needs, piece: int) -> bool: ...
    def wait(self, needs: Needs, piece: int, lane: _Lane) -> None: ...


class _Trainer:
    """A node of the trainer: what its ranks have copied into host memory."""

    def __init__(self, node: _Node, ranks: range, segments: Sequence[int]) -> None:
        self.node, self.ranks = node, ranks
        self._here = dict.fromkeys(ranks, 0.0)
        self._segments = segments
        self._waiting: list[tuple[Needs, int, _Lane]] = []

    def has(self, needs: Needs, piece: int) -> bool:
        rank = int(needs.rank[piece])
        here = self._here[rank]
        return here >= needs.end[piece] or here >= self._segments[rank]

    def wait(self, needs: Needs, piece: int, lane: _Lane) -> None:
        self._waiting.append((needs, piece, lane))

    def came(self, rank: int, here: float) -> None:
        self._here[rank] = here
        waiting, self._waiting = self._waiting, []
        for needs, piece, lane in waiting:
            if self.has(needs, piece):
                lane.go_on()
            else:
                self._waiting.append((needs, piece, lane))


class _Lane:
    """Pieces from one source into one node, answered in the order in which they are asked for."""

    def __init__(self, update: _Update, holder: _Holder, fetch: _Fetch, order: Sequence[int]) -> None:
        self._update, self._holder, self._fetch = update, holder, fetch
        self._order = iter(order)
        self._asked: deque[int] = deque()
        self._waits = False
        source, target = holder.node, fetch.node
        self._hops: Hops = ((source.memory, OUT), (source.sends, 0), (target.receives, 0), (target.memory, IN))

    def ask(self) -> None:
        piece = next(self._order, None)
        if piece is None:
            return
        clock = self._update.clock
        told = self._fetch.node.daemon.take(clock.now) + self._update.hardware.network / 2
        clock.at(told, self._told, piece)

    def _told(self, piece: int) -> None:
        clock = self._update.clock
        clock.at(self._holder.node.daemon.take(clock.now), self._read, piece)

    def _read(self, piece: int) -> None:
        self._asked.append(piece)
        if not self._waits:
            self.go_on()

    def go_on(self) -> None:
        """Sends what has been asked for, up to what is not there yet."""
        self._waits = False
        asked, holder, fetch = self._asked, self._holder, self._fetch
        while asked:
            if not holder.has(fetch.needs, asked[0]):
                self._waits = True
                holder.wait(fetch.needs, asked[0], self)
                return
            piece = asked.popleft()
            self._update.links.send(self._hops, float(fetch.needs.nbytes[piece]), self._delivered, piece)

    def _delivered(self, piece: int) -> None:
        self._fetch.came(piece)
        self.ask()


class _Fetch:
    """A version on its way to one node, which serves on what has come."""

    def __init__(self, node: _Node, needs: Needs, done: Callable[[], None], arrived: Callable[[int], None]) -> None:
        self.node, self.needs = node, needs
        self._here = bytearray(len(needs))
        self._left = len(needs)
        self._waiting: dict[int, list[_Lane]] = {}
        self._done, self._came = done, arrived

    def has(self, needs: Needs, piece: int) -> bool:
        return self._here[piece] == 1

    def wait(self, needs: Needs, piece: int, lane: _Lane) -> None:
        self._waiting.setdefault(piece, []).append(lane)

    def came(self, piece: int) -> None:
        self._here[piece] = 1
        self._left -= 1
        for lane in self._waiting.pop(piece, ()):
            lane.go_on()
        self._came(piece)
        if not self._left:
            self._done()


class _Engine:
    """An engine's nodes, the links into its workers' GPUs, and how many copies into those are left."""

    def __init__(self, nodes: Sequence[_Node], needs: Sequence[Needs], links: Links, rate: float, copies: int) -> None:
        self.nodes = nodes
        self.gpus = [[links.add(rate) for _ in range(each.shares.shape[1])] for each in needs]
        self.missing = len(nodes)
        self.begun = 0.0
        self.copies = copies


class _Update:
    def __init__(
        self, hardware: Hardware, segments: Sequence[int], nodes: Sequence[Needs], engines: int, options: Options
    ) -> None:
        self.hardware, self.clock = hardware, Clock()
        self.links = Links(self.clock)
        self._segments, self._needs, self._options = segments, nodes, options
        self._meta = Queue(hardware.request)
        self._asked: Counter[str] = Counter()
        self._outcome = Outcome()
        self._trainers = [
            _Trainer(self._node(f"trainer {first // GPUS}"), range(first, min(first + GPUS, len(segments))), segments)
            for first in range(0, len(segments), GPUS)
        ]
        copies = sum(int(np.count_nonzero(each.shares)) if options.eager else each.shares.shape[1] for each in nodes)
        self._engines = [
            _Engine([self._node(f"engine {e}.{n}") for n in range(len(nodes))], nodes, self.links, hardware.up, copies)
            for e in range(engines)
        ]
        self._fetches: list[list[_Fetch]] = [[] for _ in nodes]
        self._orders = [_order(needs) for needs in nodes]
        self._unsealed = len(segments)

    def run(self) -> Outcome:
        for trainer in self._trainers:
            self.clock.at(self._told(0.0), self._publish, trainer)
        if self._options.early:
            self.clock.at(0.0, self._fetch_all)
        self.clock.run()
        if len(self._outcome.done) < len(self._engines):
            raise RuntimeError(f"{len(self._outcome.done)} of {len(self._engines)} engines are done, the others wait")
        carried, outcome = self.links.carried, self._outcome
        engines = [node for engine in self._engines for node in engine.nodes]
        outcome.sent = [carried(trainer.node.sends) for trainer in self._trainers]
        outcome.relayed = [carried(node.sends) for node in engines]
        outcome.received = [carried(node.receives) for node in engines]
        outcome.memory = [carried(node.memory) for node in engines]
        outcome.requests = self._meta.served
        return outcome

    def _node(self, name: str) -> _Node:
        return _Node(name, self.clock, self.links, self.hardware)

    def _told(self, earliest: float) -> float:
        """When a request to the MetaServer that is made then has been answered."""
        return self._meta.take(earliest + self.hardware.network / 2) + self.hardware.network / 2

    # the trainer

    def _publish(self, trainer: _Trainer) -> None:
        """The attempt is known on this node: its ranks' bytes go into host memory."""
        for rank in trainer.ranks:
            hops = ((self.links.add(self.hardware.down), 0), (trainer.node.memory, GPU))
            begin = self.clock.now + self.hardware.control / 2
            passed = partial(self._copied, trainer, rank)
            self.clock.at(begin, partial(self.links.stream, hops, float(self._segments[rank]), DMA_BYTES, passed))

    def _copied(self, trainer: _Trainer, rank: int, here: float) -> None:
        trainer.came(rank, here)
        if here >= self._segments[rank]:
            self.clock.at(self._told(self.clock.now + self.hardware.control / 2), self._sealed)

    def _sealed(self) -> None:
        self._unsealed -= 1
        if not self._unsealed:
            self._outcome.committed = self.clock.now + self.hardware.durable
            if not self._options.early:
                self.clock.at(self._outcome.committed + self.hardware.lateness, self._fetch_all)

    # the engines' nodes

    def _fetch_all(self) -> None:
        for engine in self._engines:
            for at in range(len(engine.nodes)):
                answer = self._told(self.clock.now)
                self.clock.at(answer + self.hardware.control + 2 * self.hardware.network, self._fetch, engine, at)

    def _fetch(self, engine: _Engine, at: int) -> None:
        """Sources as the MetaServer names them; two round trips until a lane is open."""
        node, needs = engine.nodes[at], self._needs[at]
        here = partial(self._here, engine)
        fetch = _Fetch(node, needs, here, partial(self._upload, engine, at) if self._options.eager else _nothing)
        wanted = needs.of_ranks(len(self._segments))
        ranks = {int(rank): float(wanted[rank]) for rank in np.flatnonzero(wanted)}
        holders: dict[str, tuple[_Holder, Sequence[int]]] = {
            trainer.node.name: (trainer, trainer.ranks) for trainer in self._trainers
        }
        if self._options.relayed:
            holders |= {earlier.node.name: (earlier, list(ranks)) for earlier in self._fetches[at]}
        self._fetches[at].append(fetch)
        chosen = choose({name: held for name, (_, held) in holders.items()}, ranks, self._asked)
        order = self._orders[at]
        rank_of = needs.rank[order]
        for name, taken in chosen.items():
            mine = order[np.isin(rank_of, list(taken))].tolist()
            lane = _Lane(self, holders[name][0], fetch, mine)
            for _ in range(DEPTH):
                lane.ask()
        if self._options.eager and engine.begun == 0.0:
            engine.begun = self.clock.now

    def _here(self, engine: _Engine) -> None:
        """All bytes of a node are there: it says so; the last of an engine's begins the round."""
        self._outcome.fetched.append(self.clock.now)
        if self._options.eager:
            return
        engine.missing -= 1
        answer = self._told(self.clock.now + self.hardware.control / 2)
        if not engine.missing:
            late = self.hardware.lateness if len(engine.nodes) > 1 else 0.0
            self.clock.at(answer + late + self.hardware.control / 2, self._apply, engine)

    def _apply(self, engine: _Engine) -> None:
        engine.begun = self.clock.now
        for at, node in enumerate(engine.nodes):
            for worker, nbytes in enumerate(self._needs[at].of_workers.tolist()):
                hops = ((node.memory, GPU), (engine.gpus[at][worker], 0))
                self.links.stream(hops, nbytes, DMA_BYTES, partial(self._applied, engine, nbytes))

    def _applied(self, engine: _Engine, wanted: float, here: float) -> None:
        if here >= wanted - 0.5:
            self._one_done(engine)

    def _upload(self, engine: _Engine, at: int, piece: int) -> None:
        """Eager: a piece goes on to the workers that need it as soon as it is there."""
        shares, memory = self._needs[at].shares[piece], engine.nodes[at].memory
        for worker in np.flatnonzero(shares).tolist():
            hops = ((memory, GPU), (engine.gpus[at][worker], 0))
            self.links.send(hops, float(shares[worker]), self._one_done, engine)

    def _one_done(self, engine: _Engine) -> None:
        engine.copies -= 1
        if not engine.copies:
            now = self._told(self.clock.now + self.hardware.control / 2)
            self._outcome.done.append(now)
            self._outcome.pauses.append(now - engine.begun)


def _nothing(piece: int) -> None:
    pass


def _order(needs: Needs) -> Ints:
    """In which pieces are asked for: all ranks' in turn."""
    counts = np.bincount(needs.rank)
    first = np.cumsum(counts) - counts
    number = np.arange(len(needs)) - first[needs.rank]
    return np.lexsort((needs.rank, number / counts[needs.rank]))
