"""Any sharding to any other, between real processes: every element is the right one of the right version."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, together

WRITERS = (2, 3, 5)
READERS = (1, 2, 3, 7)
VERSIONS = 10

OPEN_WRITER = """
rank = weights.Rank("writer", {rank}, {size})
writer = WeightWriter({job!r}, {rank}, {size}, {socket!r}, verify={verify!r})
writer.register(rank.shards)
"""
OPEN_READER = """
held = weights.Rank("reader", {rank}, {size})
reader = WorkerWeightsReader({job!r}, {engine!r}, {rank}, {size}, {socket!r}, verify={verify!r})
reader.register(held.shards)
"""
PUBLISH = """
rank.fill({step})
publication = writer.publish({step})
publication.captured()
rank.fill(99)
publication.committed()
"""
UPDATE = "done = reader.update({step})\nresult = [done.step, held.wrong({step}), done.bytes]"


@pytest.fixture
def crew(fork: Callable[[], Process]) -> tuple[list[Process], list[Process], list[Process]]:
    """Writers, workers of one engine and workers of another."""
    return [fork() for _ in range(max(WRITERS))], [fork() for _ in range(max(READERS))], [fork() for _ in range(2)]


def test_case_38_39_any_number_of_ranks_to_any_other(
    daemon: Daemon, crew: tuple[list[Process], list[Process], list[Process]]
) -> None:
    for writers in WRITERS:
        for readers in READERS:
            _run(daemon, crew, writers, readers, "checksum" if (writers + readers) % 2 else "off")


def _run(
    daemon: Daemon, crew: tuple[list[Process], list[Process], list[Process]], writers: int, readers: int, verify: str
) -> None:
    job = f"matrix-{writers}-{readers}"
    common = {"job": job, "socket": daemon.socket, "verify": verify}
    sides = [(crew[0][:writers], OPEN_WRITER, ""), (crew[1][:readers], OPEN_READER, "a"), (crew[2], OPEN_READER, "b")]
    for side, source, engine in sides if readers % 2 else reversed(sides):
        given = (source.format(rank=rank, size=len(side), engine=engine, **common) for rank in range(len(side)))
        together(side, given)
    workers = crew[1][:readers] + crew[2]
    for step in range(1, VERSIONS + 1):
        together(crew[0][:writers], [PUBLISH.format(step=step)] * writers)
        for step_done, wrong, nbytes in together(workers, [UPDATE.format(step=step)] * len(workers)):
            assert (step_done, wrong) == (step, []), f"{writers} to {readers} ranks, step {step}: {wrong}"
            assert nbytes > 0
    crew[0][0].do("writer.close_job()")
    together(crew[0][:writers], ["writer.close()"] * writers)
    together(workers, ["reader.close()"] * len(workers))
    assert daemon.segments() == []
