"""Simulated links: as fast as their rate, fair between classes, passing on what still arrives."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.simulation.links import Clock, Links, Queue


class Line:
    """Links, and when what was sent over them came."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.links = Links(self.clock)
        self.came: dict[str, float] = {}

    def send(self, name: str, hops: tuple[tuple[int, int], ...], nbytes: float, at: float = 0.0) -> None:
        self.clock.at(at, partial(self.links.send, hops, nbytes, self._came, name))

    def _came(self, name: str) -> None:
        self.came[name] = self.clock.now


def test_piece_alone_takes_as_long_as_its_slowest_hop() -> None:
    line = Line()
    hops = tuple((line.links.add(rate), 0) for rate in (400.0, 50.0, 200.0))
    line.send("one", hops, 100.0)
    line.clock.run()
    assert line.came == {"one": pytest.approx(2.0)}


def test_pieces_in_a_row_take_as_long_as_all_their_bytes_on_the_slowest_hop() -> None:
    line = Line()
    hops = tuple((line.links.add(rate), 0) for rate in (400.0, 100.0, 200.0))
    for number in range(10):
        line.send(str(number), hops, 10.0)
    line.clock.run()
    assert max(line.came.values()) == pytest.approx(1.0)
    assert [*line.came] == [str(number) for number in range(10)]


def test_faster_link_serves_others_while_a_slow_one_feeds_it() -> None:
    line = Line()
    slow, fast = line.links.add(10.0), line.links.add(100.0)
    line.send("slow", ((slow, 0), (fast, 0)), 100.0)
    line.send("fast", ((fast, 0),), 100.0, at=0.5)
    line.clock.run()
    assert line.came["slow"] == pytest.approx(10.0)
    assert line.came["fast"] == pytest.approx(2.0)  # the slow one's bytes take a second of it


def test_classes_share_a_link_by_bytes_however_many_pieces_each_has_waiting() -> None:
    line = Line()
    link = line.links.add(100.0, classes=2)
    for number in range(20):
        line.send(f"many {number}", ((link, 0),), 10.0)
    for number in range(2):
        line.send(f"few {number}", ((link, 1),), 10.0)
    line.clock.run()
    assert line.came["few 1"] <= 0.5
    assert max(line.came.values()) == pytest.approx(2.2)


def test_class_that_was_idle_does_not_catch_up() -> None:
    line = Line()
    link = line.links.add(100.0, classes=2)
    for number in range(20):
        line.send(f"first {number}", ((link, 0),), 10.0)
    for number in range(10):
        line.send(f"late {number}", ((link, 1),), 10.0, at=1.0)
    line.clock.run()
    assert line.came["late 9"] == pytest.approx(3.0, abs=0.21)
    assert line.came["first 19"] == pytest.approx(2.9, abs=0.21)
    assert line.links.carried(link) == pytest.approx(300.0)


def test_stream_tells_of_every_piece_and_keeps_a_link_busy() -> None:
    line = Line()
    link = line.links.add(10.0)
    told: list[tuple[float, float]] = []
    line.links.stream(((link, 0),), 100.0, 30.0, lambda here: told.append((line.clock.now, here)))
    line.clock.run()
    assert [here for _, here in told] == [30.0, 60.0, 90.0, 100.0]
    assert told[-1][0] == pytest.approx(10.0)


def test_stream_of_nothing_is_there_at_once() -> None:
    line = Line()
    told: list[float] = []
    line.links.stream(((line.links.add(1.0), 0),), 0.0, 30.0, told.append)
    assert told == [0.0]


def test_queue_serves_in_turn() -> None:
    queue = Queue(2.0)
    assert [queue.take(0.0), queue.take(1.0), queue.take(10.0)] == [2.0, 4.0, 12.0]
    assert queue.served == 3
