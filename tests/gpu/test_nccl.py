"""Weights sent between GPUs by NCCL: a process on each. On one GPU the same goes by sockets, through host memory.

Where there are too few GPUs, each process is on a host of its own as far as NCCL knows: it sends between those, by TCP.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.daemons import Daemon, daemon, folder
from tests.e2e.conftest import fork, nursery
from tests.e2e.exchange_node import STANDS, Crew, Fork
from tests.e2e.test_exchange_faults import broken_off
from tests.e2e.workers.processes import Process, RemoteError, together
from tests.nodes.clusters import Cluster
from tests.nodes.test_homes_functional import crew_on

__all__ = ["daemon", "folder", "fork", "nursery"]

GPUS = torch.cuda.device_count()
GROUP = "result = [type(one).__name__ for one in {}._exchanges._groups.values()]"
WRITERS, READERS = GROUP.format("writer._lender"), GROUP.format("reader._taker")


def crew_of(
    daemon: Daemon, fork: Fork, writers: int, engines: list[int], *, verify: str = "checksum", ring: int = 4096
) -> Crew:
    """A process on each GPU, or on each of several hosts, as NCCL sees it."""
    count = writers + sum(engines)
    hosts = count > GPUS
    devices = [device(0 if hosts else number) for number in range(count)]
    return Crew(daemon, fork, writers, engines, verify=verify, ring=ring, devices=devices, hosts=hosts)


def device(number: int) -> str:
    return f"cuda:{number if number < GPUS else 0}"


def groups(crew: Crew) -> set[str]:
    sides = [*((writer, WRITERS) for writer in crew.writers), *((worker, READERS) for worker in crew.workers)]
    return {name for process, source in sides for name in process.do(source)}


@pytest.mark.parametrize(("writers", "engines"), [(1, [1]), (2, [1]), (1, [2]), (2, [2]), (1, [1, 1]), (4, [4])])
@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_a_process_on_each(daemon: Daemon, fork: Fork, writers: int, engines: list[int], verify: str) -> None:
    crew = crew_of(daemon, fork, writers, engines, verify=verify)
    made = [crew.hand_over(step) for step in range(1, 5)]
    assert made == [[1] * (writers + sum(engines))] * 4
    assert groups(crew) == {"NcclGroup"}
    crew.close()


@pytest.mark.parametrize(("writers", "engines"), [("a", ["b"]), ("ab", ["ba"])])
def test_between_nodes(tmp_path: Path, fork: Fork, writers: str, engines: list[str]) -> None:
    """Each process is with the daemon of its own node; to NCCL they are on hosts of their own."""
    with Cluster(tmp_path, "a", "b") as cluster:
        count = len(writers) + sum(map(len, engines))
        crew = crew_on(cluster, fork, "j", writers, *engines, devices=[device(0)] * count, hosts=True)
        for step in range(1, 4):
            crew.hand_over(step)
        assert groups(crew) == {"NcclGroup"}
        crew.close()


@pytest.mark.parametrize("ring", [768, 1 << 20, 192 << 20])
def test_any_ring(daemon: Daemon, fork: Fork, ring: int) -> None:
    crew = crew_of(daemon, fork, 1, [1], ring=ring)
    for step in range(1, 4):
        crew.hand_over(step)
    crew.close()


def test_processes_on_one_gpu_go_by_sockets(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 2, [2], devices=["cuda:0"])
    for step in range(1, 4):
        crew.hand_over(step)
    assert groups(crew) == {"SocketGroup"}
    crew.close()


def victim_of(crew: Crew, side: str) -> tuple[Process, str]:
    return (crew.writers[0], "send") if side == "writer" else (crew.workers[0], "receive")


@pytest.mark.parametrize("side", ["writer", "reader"])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_killed_in_the_middle(daemon: Daemon, fork: Fork, side: str, after: int) -> None:
    crew = crew_of(daemon, fork, 1, [1])
    crew.hand_over(1)
    victim, call = victim_of(crew, side)
    raised = broken_off(crew, victim, call, after, "SIGKILL", 2)
    assert len(raised) == 1
    if side == "writer":
        assert crew.workers[0].do(STANDS.format(step=1))[0] in ("dirty", "ready")
        crew.writers[0] = fork()
        crew.writers[0].do(crew.writer(0, 1, device=device(0)))
    else:
        crew.writers[0].do("publication.withdraw()")
        crew.engines["e0"][0] = fork()
        crew.workers[0].do(crew.reader("e0", 0, 1, device=device(1)))
    crew.recover(3)
    assert groups(crew) == {"NcclGroup"}
    crew.close()


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_frozen_in_the_middle(daemon: Daemon, fork: Fork, side: str) -> None:
    crew = crew_of(daemon, fork, 1, [1])
    crew.hand_over(1)
    victim, call = victim_of(crew, side)
    assert len(broken_off(crew, victim, call, 2, "SIGSTOP", 2)) == 1
    victim.resume()
    with pytest.raises(RemoteError):
        victim.finish()
    crew.writers[0].do("publication.withdraw()")
    crew.recover(3)
    crew.close()


@pytest.mark.parametrize("odd", [0, 1])
def test_other_plans_are_refused_before_any_payload(daemon: Daemon, fork: Fork, odd: int) -> None:
    crew = crew_of(daemon, fork, 1, [1])
    everyone = [*crew.writers, *crew.workers]
    everyone[odd].do("import awexd_transports.plan as planner\nplanner.PLANNER_VERSION = 1000")
    crew.start(1, 10)
    for process in everyone:
        with pytest.raises(RemoteError, match="different plans"):
            process.finish()
    assert crew.workers[0].do("result = [reader.state, reader.version]") == ["empty", None]
    crew.close()


def test_engine_is_replaced(daemon: Daemon, fork: Fork) -> None:
    crew = crew_of(daemon, fork, 1, [1])
    crew.hand_over(1)
    together(crew.engines.pop("e0"), ["reader.close()"])
    crew._devices = [device(1)]
    crew.add("e1", 1)
    assert crew.hand_over(2) == [1, 2]
    assert groups(crew) == {"NcclGroup"}
    crew.close()
