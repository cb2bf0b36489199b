"""One step's weights from a trainer's GPUs to all engines' GPUs, piece by piece, in simulated time.

What happens is what the daemons do (docs/nodes.md): ranks copy their segments into host memory and seal; when all
have, the MetaServer commits, and tells the engines' nodes; each asks for tickets, and fetches what its workers need
from nodes that have it, or that began to fetch the same before it, which serve on what has come; once all of an
engine's nodes have all, its workers copy it into their GPUs. ``Options`` say what does not wait for what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from awexd.metaserver.model import Piece, Version
from awexd.metaserver.sources import choose
from awexd.peers.tcp import TcpLane
from awexd.store.arriving import WINDOW, WINDOW_SHARE
from awexd_client.outgoing import FIRST_SLICE, SLICE
from awexd_transports.names import Ints
from awexd_transports.turns import turn
from benchmarks.simulation.hardware import GPUS, Hardware
from benchmarks.simulation.links import Clock, Hops, Links, Queue
from benchmarks.simulation.needs import Needs
from benchmarks.simulation.waves import Told, Waves, Worker

DMA_BYTES, QUEUED = 32 << 20, 4
"""In which a GPU's copies are simulated, and how many it has before it: all of a launch are put there at once."""
IN, OUT, GPU = range(3)
"""Whose bytes pass a node's host memory: written by NICs, read by them, and either by GPUs."""
DEPTH = TcpLane.depth
"""Pieces that a lane asks for at once."""


@dataclass(frozen=True)
class Options:
    """How an update goes.

    Attributes:
        early: nodes fetch what ranks have copied into host memory, from when all have begun, before they have sealed.
        overlap: workers copy what has come of a version while the rest of it does: ``update(overlap=True)``.
    """

    early: bool = False
    overlap: bool = False


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
        self._here[rank] = max(here, self._here[rank])
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
        if self._fetch.pauses(self):
            return
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
        self._paused: list[_Lane] = []
        self._window = max(float(WINDOW), needs.total / WINDOW_SHARE)
        self.landed, self.workers = 0.0, list[Worker]()

    def ahead(self) -> float:
        """Bytes that have landed and that some worker has not been told of."""
        return self.landed - min((worker.known for worker in self.workers), default=self.landed)

    def pauses(self, lane: _Lane) -> bool:
        """Whether no more is asked for now: workers that overlap lag behind. The lane asks again once they do not."""
        if self.ahead() <= self._window:
            return False
        self._paused.append(lane)
        return True

    def go_on(self) -> None:
        paused, self._paused = self._paused, []
        for lane in paused:
            lane.ask()

    def has(self, needs: Needs, piece: int) -> bool:
        return self._here[piece] == 1

    def wait(self, needs: Needs, piece: int, lane: _Lane) -> None:
        self._waiting.setdefault(piece, []).append(lane)

    def came(self, piece: int) -> None:
        self._here[piece] = 1
        self._left -= 1
        self.landed += float(self.needs.nbytes[piece])
        for lane in self._waiting.pop(piece, ()):
            lane.go_on()
        self._came(piece)
        if not self._left:
            self._done()


class _Engine:
    """An engine's nodes, its workers by node, the links into their GPUs, and how many of them are not done."""

    def __init__(self, nodes: Sequence[_Node], needs: Sequence[Needs], links: Links, rate: float) -> None:
        self.nodes = nodes
        self.gpus = [[links.add(rate) for _ in range(each.shares.shape[1])] for each in needs]
        self.workers: list[list[Worker]] = [[] for _ in nodes]
        self.missing = len(nodes)
        self.fetches: list[_Fetch | None] = [None] * len(nodes)
        self.over = [False] * len(nodes)
        self.agreed = False
        self.begun: float | None = None
        self.left = sum(map(len, self.gpus))


class _Update:
    def __init__(
        self, hardware: Hardware, segments: Sequence[int], nodes: Sequence[Needs], engines: int, options: Options
    ) -> None:
        self.hardware, self.clock = hardware, Clock()
        self.links = Links(self.clock)
        self._segments, self._needs, self._options = segments, nodes, options
        self._meta = Queue(hardware.request)
        self._outcome = Outcome()
        self._trainers = [
            _Trainer(self._node(f"trainer {first // GPUS}"), range(first, min(first + GPUS, len(segments))), segments)
            for first in range(0, len(segments), GPUS)
        ]
        self._writers = {rank: trainer.node.name for trainer in self._trainers for rank in trainer.ranks}
        pieces = {rank: Piece("", nbytes) for rank, nbytes in enumerate(segments)}
        self._versions = [Version((1, 1), 1, len(segments), pieces) for _ in nodes]
        for version in self._versions:
            version.asked = self._versions[0].asked
        self._engines = [
            _Engine([self._node(f"engine {e}.{n}") for n in range(len(nodes))], nodes, self.links, hardware.up)
            for e in range(engines)
        ]
        self._fetches: list[list[_Fetch]] = [[] for _ in nodes]
        self._orders = [_order(needs) for needs in nodes]
        self._waves = [Waves.of(needs, segments) for needs in nodes] if options.overlap else []
        self._unbegun = self._unsealed = len(segments)
        self._committed = not options.early
        self._early: list[tuple[_Engine, int]] = []
        """Nodes that have all of what is not committed yet."""

    def run(self) -> Outcome:
        for trainer in self._trainers:
            self.clock.at(self._told(0.0), self._publish, trainer)
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
        self._unbegun -= len(trainer.ranks)
        if self._options.early and not self._unbegun:
            self.clock.at(self.clock.now + self.hardware.lateness, self._fetch_all)

    def _copied(self, trainer: _Trainer, rank: int, here: float) -> None:
        if here >= self._segments[rank]:
            trainer.came(rank, here)
            self.clock.at(self._told(self.clock.now + self.hardware.control / 2), self._sealed)
        elif self._options.early:
            self.clock.at(self.clock.now + self.hardware.control / 4, trainer.came, rank, _sliced(here))

    def _sealed(self) -> None:
        self._unsealed -= 1
        if not self._unsealed:
            self._outcome.committed = self.clock.now + self.hardware.durable
            known = self._outcome.committed + self.hardware.lateness
            self.clock.at(known, self._known if self._options.early else self._fetch_all)

    # the engines' nodes

    def _fetch_all(self) -> None:
        for engine in self._engines:
            for at in range(len(engine.nodes)):
                answer = self._told(self.clock.now)
                self.clock.at(answer + self.hardware.control + 2 * self.hardware.network, self._fetch, engine, at)

    def _fetch(self, engine: _Engine, at: int) -> None:
        """Sources as the MetaServer names them; two round trips until a lane is open."""
        node, needs = engine.nodes[at], self._needs[at]
        arrived: Callable[[int], None] = _nothing
        if self._options.overlap:
            waves = self._waves[at]
            engine.workers[at] = [
                Worker(pieces, nbytes, partial(self._copy, engine, at, number))
                for number, (pieces, nbytes) in enumerate(zip(waves.pieces, waves.nbytes, strict=True))
            ]
            arrived = partial(self._landed, engine, at, Told(needs.total))
        fetch = _Fetch(node, needs, partial(self._here, engine, at), arrived)
        fetch.workers = engine.workers[at]
        engine.fetches[at] = fetch
        ranks = np.unique(needs.rank).tolist()
        holders: dict[str, tuple[_Holder, Sequence[int]]] = {
            trainer.node.name: (trainer, trainer.ranks) for trainer in self._trainers
        }
        holders |= {earlier.node.name: (earlier, ranks) for earlier in self._fetches[at]}
        self._fetches[at].append(fetch)
        has = {name: held for name, (_, held) in holders.items()}
        chosen = choose(self._versions[at], has, ranks, lambda name: 0, self._writers)
        if chosen is None:
            raise ValueError(f"no node has all of ranks {ranks[:3]} and so on")
        order = self._orders[at]
        rank_of = needs.rank[order]
        for name, taken in chosen.items():
            mine = order[np.isin(rank_of, list(taken))].tolist()
            lane = _Lane(self, holders[name][0], fetch, mine)
            for _ in range(DEPTH):
                lane.ask()

    def _here(self, engine: _Engine, at: int) -> None:
        """All bytes of a node are there, and committed: it says so; the last of an engine's begins the round."""
        if not self._committed:
            self._early.append((engine, at))
            return
        engine.over[at] = True
        self._outcome.fetched.append(self.clock.now)
        engine.missing -= 1
        answer = self._told(self.clock.now + self.hardware.control / 2)
        if not engine.missing:
            rounds = (2 if self._options.overlap else 1) if len(engine.nodes) > 1 else 0
            late = rounds * self.hardware.lateness + (self.hardware.control if self._options.overlap else 0.0)
            self.clock.at(answer + late + self.hardware.control / 2, self._agreed, engine)

    def _known(self) -> None:
        """The engines' nodes know that it is committed."""
        self._committed = True
        early, self._early = self._early, []
        for engine, at in early:
            self._here(engine, at)

    def _agreed(self, engine: _Engine) -> None:
        engine.agreed = True
        for at, node in enumerate(engine.nodes):
            for number, nbytes in enumerate(self._needs[at].of_workers.tolist()):
                if self._options.overlap:
                    if engine.workers[at][number].left < 1.0:
                        self._one_done(engine)
                    else:
                        self._go(engine, at, number)
                    continue
                engine.begun = self.clock.now
                hops = ((node.memory, GPU), (engine.gpus[at][number], 0))
                done = partial(self._applied, engine, nbytes)
                self.links.stream(hops, nbytes, DMA_BYTES, done, window=QUEUED)

    def _applied(self, engine: _Engine, wanted: float, here: float) -> None:
        if here >= wanted - 0.5:
            self._one_done(engine)

    def _one_done(self, engine: _Engine) -> None:
        engine.left -= 1
        if not engine.left:
            now = self._told(self.clock.now + self.hardware.control / 2)
            self._outcome.done.append(now)
            self._outcome.pauses.append(now - (engine.begun or 0.0))

    # workers that overlap

    def _landed(self, engine: _Engine, at: int, told: Told, piece: int) -> None:
        workers = engine.workers[at]
        for number, wave in self._waves[at].touched[piece]:
            workers[number].landed(wave)
        if told.land(float(self._needs[at].nbytes[piece])):
            for number, worker in enumerate(workers):
                if worker.idle:
                    self.clock.at(self.clock.now + self.hardware.control / 2, self._go, engine, at, number)

    def _go(self, engine: _Engine, at: int, number: int) -> None:
        worker, fetch = engine.workers[at][number], engine.fetches[at]
        if fetch is not None and worker.idle:
            worker.known = fetch.landed
            fetch.go_on()
        worker.go(self.clock.now)
        if worker.begun is not None:
            engine.begun = worker.begun if engine.begun is None else min(engine.begun, worker.begun)

    def _copy(self, engine: _Engine, at: int, number: int, nbytes: float) -> None:
        hops = ((engine.nodes[at].memory, GPU), (engine.gpus[at][number], 0))
        done = partial(self._wave_done, engine, at, number, nbytes)
        copy = partial(self.links.stream, hops, nbytes, DMA_BYTES, done, window=QUEUED)
        self.clock.at(self.clock.now + self.hardware.launch, copy)

    def _wave_done(self, engine: _Engine, at: int, number: int, wanted: float, here: float) -> None:
        if here < wanted - 0.5:
            return
        worker = engine.workers[at][number]
        worker.copied()
        if worker.left < 1.0 and engine.agreed:
            self._one_done(engine)
        else:
            self._go(engine, at, number)


def _nothing(piece: int) -> None:
    pass


def _sliced(here: float) -> float:
    """Of so many bytes that a rank has copied, those that it has said."""
    told, size = 0, FIRST_SLICE
    while told + size <= here:
        told, size = told + size, min(SLICE, 2 * size)
    return float(told)


def _order(needs: Needs) -> Ints:
    """In which pieces are asked for: all ranks' in turn."""
    counts = np.bincount(needs.rank)
    first = np.cumsum(counts) - counts
    number = np.arange(len(needs)) - first[needs.rank]
    turns = np.array([turn(rank) for rank in range(len(counts))])
    return np.lexsort((turns[needs.rank], number / counts[needs.rank]))
