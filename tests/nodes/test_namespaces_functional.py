"""Real hosts as far as the network goes: trainers and engines in namespaces of their own; links that are cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.attacks.raw import Raw
from tests.e2e.exchange_node import Crew
from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import Cluster, Engine, Trainer, job_of, lasting, texts, until
from tests.nodes.large import PUBLISH, UPDATE, on_its_way, reader_on, writer_on
from tests.peers.hosts import Hosts, may

Forks = Callable[[int], list[Process]]
ENTER = """
import ctypes
with open("/run/netns/{name}") as there:
    assert ctypes.CDLL(None).setns(there.fileno(), 0x40000000) == 0
"""
"""Of the network only (CLONE_NEWNET); Python 3.11 has no name for either."""
pytestmark = pytest.mark.skipif(not may(), reason="needs root and network namespaces: run as root")


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(request.param) as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts, folder: Path) -> Iterator[Cluster]:
    """A daemon on each host, ``n0`` and so on; the MetaServer is on the last."""
    with ExitStack() as stack:
        token = folder / "tokens"
        token.touch(0o600)
        token.write_text("node a-token-of-the-tests\n")
        made = Cluster(folder, ttl=4.0)
        last = len(hosts.names) - 1
        made.server.command = [*hosts.wrapper(last), *made.server.command, "--token-file", str(token)]
        made.server.command += ["--host", hosts.addresses[last]]
        stack.enter_context(made)
        for number, address in enumerate(hosts.addresses):
            arguments = ("--token-file", str(token))
            made.add(f"n{number}", *arguments, wrapper=hosts.wrapper(number), host=address)
        yield made


@pytest.mark.parametrize("hosts", [2, 4], indirect=True)
def test_bits_are_equal_from_any_to_any(hosts: Hosts, cluster: Cluster, forks: Forks) -> None:
    names = list(cluster.daemons)
    trainers = [Trainer(forks(2), cluster[name], job=f"j{at}") for at, name in enumerate(names[:2])]
    engines = [
        Engine(forks(1 + (at + number) % 2), cluster[name], name, job=f"j{at}")
        for at in range(2)
        for number, name in enumerate(names)
    ]
    for step in range(1, 5):
        for trainer in trainers:
            trainer.publish(step)
        for engine in engines:
            engine.update(step)


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_link_that_is_cut_in_mid_transfer_costs_time_and_nothing_else(
    hosts: Hosts, cluster: Cluster, forks: Forks
) -> None:
    trainer = writer_on(cluster["n0"], forks(1)[0])
    engine = reader_on(cluster["n1"], forks(1)[0])
    for step in range(1, 5):
        trainer.start(PUBLISH.format(step=step))
        engine.start(UPDATE.format(step=step))
        on_its_way(cluster["n1"], step)
        hosts.cut(step % 2)  # the trainer's, or the engine's
        trainer.finish()  # it waits for nobody
        lasting(1 if step < 4 else 7)
        hosts.join(step % 2)
        assert engine.finish() == [step, [step]]


@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_trainer_that_is_cut_off_is_replaced_by_a_node_that_has_it(
    hosts: Hosts, cluster: Cluster, forks: Forks
) -> None:
    trainer = writer_on(cluster["n0"], forks(1)[0])
    first = reader_on(cluster["n1"], forks(1)[0])
    trainer.do(PUBLISH.format(step=1))
    assert first.do(UPDATE.format(step=1)) == [1, [1]]
    hosts.cut(0)
    second = reader_on(cluster["n2"], forks(1)[0], "another")
    assert second.do(UPDATE.format(step=1)) == [1, [1]]
    trainer.do(PUBLISH.format(step=2))
    hosts.join(0)
    for engine in (first, second):
        assert engine.do(UPDATE.format(step=2)) == [2, [2]]
    until(cluster["n0"], lambda status: status["metaserver"]["connected"])


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_slow_link_delays_no_trainer_for_long(hosts: Hosts, cluster: Cluster, forks: Forks) -> None:
    if not hosts.queue(0, "tbf rate 100mbit burst 256k latency 50ms"):
        pytest.skip("needs the kernel's tbf queueing discipline (sch_tbf)")
    trainer = writer_on(cluster["n0"], forks(1)[0])
    engine = reader_on(cluster["n1"], forks(1)[0])
    trainer.do(PUBLISH.format(step=1))
    until(cluster["n1"], lambda status: (job_of(status, "j").get("elsewhere") or {}).get("fetching"))
    began = time.monotonic()
    for step in range(2, 6):
        trainer.do(PUBLISH.format(step=step))
    assert time.monotonic() - began < 50
    engine.start("done = reader.update(timeout=60)\nresult = [done.step, seen()]")
    step, seen = engine.finish()
    assert seen == [step]
    assert texts(cluster["n0"], "failed") == []


@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_trainer_moves_from_host_to_host(hosts: Hosts, cluster: Cluster, forks: Forks) -> None:
    names = list(cluster.daemons)
    engines = [Engine(forks(1 + number % 2), cluster[name], name) for number, name in enumerate(names)]
    step = 0
    for name in (*names, names[0]):
        trainer = Trainer(forks(2), cluster[name])
        for _ in range(2):
            step += 1
            trainer.publish(step)
            for engine in engines:
                engine.update(step)
        trainer.close()
        for other in names:
            if other != name:
                until(cluster[other], lambda status: not job_of(status, "j")["elsewhere"]["trainer_on"])


@pytest.mark.parametrize("hosts", [3], indirect=True)
@pytest.mark.parametrize("number", [0, 1])
def test_link_that_loses_and_delays_costs_time_and_nothing_else(
    hosts: Hosts, cluster: Cluster, forks: Forks, number: int
) -> None:
    trainer = writer_on(cluster["n0"], forks(1)[0])
    engine = reader_on(cluster["n1"], forks(1)[0])
    trainer.start(PUBLISH.format(step=1))
    engine.start(UPDATE.format(step=1))
    on_its_way(cluster["n1"], 1)
    with hosts.harmed(number, "loss"):
        trainer.finish()
        lasting(3)
    assert engine.finish() == [1, [1]]


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_weights_are_exchanged_between_processes_of_several_hosts(
    hosts: Hosts, cluster: Cluster, fork: Callable[[], Process]
) -> None:
    """Writers on two of them, an engine on two; a link that is cut in the middle frees the others."""
    places = [0, 1, 1, 2]
    left = iter(places)

    def fork_there() -> Process:
        process = fork()
        process.do(ENTER.format(name=hosts.names[next(left)]))
        return process

    sockets = [cluster[f"n{place}"].socket for place in places]
    with Raw(sockets[0]) as first:
        assert first.call("session.home", job="there", join=True) == {"node": None}
    crew = Crew(cluster["n0"], fork_there, 2, [2], job="there", sockets=sockets)
    for step in range(1, 4):
        crew.hand_over(step)
    crew.start(4, 10.0)
    hosts.cut(1)
    raised = []
    for process in [*crew.writers, *crew.workers]:
        try:
            process.finish()
        except RemoteError as error:
            raised.append(error.kind)
    assert set(raised) <= {"VersionUnavailable", "DeadlineExceeded", "VersionConflict", "EpochChanged"}
    hosts.join(1)
    crew.recover(5)
    crew.hand_over(6)
    crew.close()
