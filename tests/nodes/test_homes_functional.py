"""Exchanges between nodes: one daemon decides them, and processes of the others are as if they were its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from awexd.protocol import Message
from awexd_transports.errors import AccessDenied, AwexdError, InvalidArgument
from tests.attacks.raw import Raw
from tests.e2e.exchange_node import FAULT, STANDS, UPDATE, Crew, Fork
from tests.e2e.workers.processes import Process, RemoteError, together
from tests.nodes.clusters import Cluster, job_of, lasting, texts, until

Forks = Callable[[int], list[Process]]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """For faults of daemons."""
    with Cluster(tmp_path, "a", "b", ttl=3.0) as cluster:
        yield cluster


def crew_on(cluster: Cluster, fork: Fork, job: str, writers: str, *engines: str, **more: object) -> Crew:
    """A process on each of the nodes that are named; the first one's is the home."""
    sockets = [cluster[name].socket for name in writers + "".join(engines)]
    sizes = [len(names) for names in engines]
    with Raw(sockets[0]) as first:
        first.call("session.home", job=job, join=True)
    return Crew(cluster[writers[0]], fork, len(writers), sizes, job=job, sockets=sockets, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("writers", "engines"), [("a", ["b"]), ("ab", ["b"]), ("abc", ["cb"]), ("bb", ["aacc"]), ("acb", ["b", "ca", "a"])]
)
@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_any_ranks_on_any_nodes(cluster: Cluster, fork: Fork, writers: str, engines: list[str], verify: str) -> None:
    job = f"any-{writers}-{'-'.join(engines)}-{verify}"
    crew = crew_on(cluster, fork, job, writers, *engines, verify=verify)
    count = len(writers) + sum(map(len, engines))
    assert [crew.hand_over(step) for step in range(1, 5)] == [[1] * count] * 4
    for name in "abc":
        found = job_of(cluster[name].ask("status"), job)
        assert bool(found) == (name == writers[0])
    crew.close()


def test_sessions_are_told_where_they_are_forwarded(cluster: Cluster, fork: Fork) -> None:
    crew = crew_on(cluster, fork, "first", "b", "a")
    (worker,) = crew.workers
    sessions = cluster["a"].ask("sessions")["sessions"]
    assert [(row["home"], row["job"].split("/")[1]) for row in sessions if row["home"]] == [("b", "first")]
    there = [row for row in cluster["b"].ask("sessions")["sessions"] if row["node"]]
    assert [(row["node"], row["role"], row["engine"]) for row in there] == [("a", "reader", "e0")]
    assert crew.hand_over(1) == [1, 1]
    assert worker.do("reader.close()") is None
    crew.writers[0].do("writer.close()")
    until(cluster["b"], lambda status: not any(row["node"] for row in cluster["b"].ask("sessions")["sessions"]))


def test_status_of_the_cluster_names_the_home(cluster: Cluster, fork: Fork) -> None:
    crew = crew_on(cluster, fork, "named", "c", "a")
    crew.hand_over(1)
    command = [sys.executable, "-m", "awexd.ctl", "status", "--metaserver", cluster.server.url]
    assert "exchanged by way of node c" in subprocess.check_output(command, text=True, timeout=60)
    crew.close()


def test_parcels_and_phases_are_of_the_process_own_node(cluster: Cluster, fork: Fork) -> None:
    crew = crew_on(cluster, fork, "parks", "ab", "c")
    crew.hand_over(1)
    writer = crew.writers[1]
    writer.do("writer.park('optimizer', {'m': torch.arange(1000.0)})")
    assert len(cluster["b"].segments()) == 1
    assert cluster["a"].segments() == []
    crew.hand_over(2)
    writer.do("writer.close_job()")
    until(cluster["b"], lambda status: cluster["b"].segments() == [])
    assert not job_of(cluster["a"].ask("status"), "parks")


def test_control_process_finds_the_workers_of_its_node(cluster: Cluster, fork: Fork) -> None:
    crew = crew_on(cluster, fork, "driven", "a", "bb")
    crew.hand_over(1)
    with Raw(cluster["b"].socket) as raw:
        assert raw.call("session.home", job="driven", join=False) == {"node": "a"}
        found = raw.call("read.engine", job="driven", engine="e0")
    assert [(one["rank"], one["version"]) for one in found["workers"]] == [(0, [1, 1]), (1, [1, 1])]
    with Raw(cluster["c"].socket) as raw:
        assert raw.call("session.home", job="driven", join=False) == {"node": None}
    crew.close()


@pytest.mark.parametrize(
    ("operation", "arguments", "body", "error"),
    [
        ("write.register", {"rank": 1, "world_size": 2, "epoch": 1, "keep": 2}, b"1", AccessDenied),
        ("write.slot", {}, None, AccessDenied),
        ("write.begin", {"step": 1, "set": "0" * 64}, None, AccessDenied),
        ("write.lend", {"nbytes": 1, "devices": []}, None, AccessDenied),
        ("job.close", {"job": "another"}, None, AccessDenied),
        ("read.wait", {"step": 1}, None, InvalidArgument),
        ("group.watch", {"exchange": 1}, None, InvalidArgument),
    ],
)
def test_forwarded_session_can_do_nothing_else(
    cluster: Cluster, fork: Fork, operation: str, arguments: Message, body: bytes | None, error: type[AwexdError]
) -> None:
    crew = crew_on(cluster, fork, job := f"strict-{operation}", "a", "b")
    if operation == "write.register":
        arguments = {"job": job} | arguments
    with Raw(cluster["b"].socket) as raw:
        assert raw.call("session.home", job=job, join=True) == {"node": "a"}
        assert isinstance(raw.refused(operation, body=body, **arguments), error)
    crew.hand_over(1)
    crew.close()


def test_other_rings_are_refused_on_all_nodes(cluster: Cluster, fork: Fork) -> None:
    crew = crew_on(cluster, fork, "rings", "ab", "b")
    crew.hand_over(1)
    odd = crew.writers[1]
    odd.do("writer.close()")
    odd.do(crew.writer(1, 2, ring=4096, socket=cluster["b"].socket))
    crew.start(2, 10)
    for process in [*crew.writers, *crew.workers]:
        with pytest.raises(RemoteError, match=r"on node b") as caught:
            process.finish()
        assert caught.value.kind == "InvalidArgument"
    assert crew.workers[0].do(STANDS.format(step=1)) == ["ready", [1, 1], []]
    crew.close()


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("side", ["writer", "worker"])
def test_process_that_dies_or_freezes_on_another_node_frees_the_others(
    cluster: Cluster, fork: Fork, side: str, number: str
) -> None:
    crew = crew_on(cluster, fork, f"gone-{side}-{number}", "ab", "ba")
    crew.hand_over(1)
    victim = crew.writers[1] if side == "writer" else crew.workers[0]
    victim.do(FAULT.format(call="send" if side == "writer" else "receive", after=2, signal=number))
    crew.start(2, 4.0)
    for process in [*crew.writers, *crew.workers]:
        if process is not victim:
            with contextlib.suppress(RemoteError):
                process.finish()
    if number == "SIGSTOP":
        victim.kill()
    fresh = fork()
    if side == "writer":
        crew.writers[1] = fresh
        fresh.do(crew.writer(1, 2, socket=cluster["b"].socket))
    else:
        crew.engines["e0"][0] = fresh
        fresh.do(crew.reader("e0", 0, 2, socket=cluster["b"].socket))
    for worker in crew.workers:
        state, version, wrong = worker.do(STANDS.format(step=1))
        assert (state, version) in (("dirty", None), ("empty", None), ("ready", [1, 1]), ("ready", [1, 2]))
        assert version != [1, 1] or not wrong
    crew.recover(3)
    crew.close()


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_daemon_that_goes_and_comes_again(own: Cluster, fork: Fork, name: str, how: str) -> None:
    """Home or not: its clients, and those that it spoke for, find each other again."""
    crew = crew_on(own, fork, "j", "ab", "ba")
    crew.hand_over(1)
    if how == "kill":
        own[name].kill()
    own[name].restart()
    (home,) = again(own, crew, 2)
    crew.daemon = own[home]
    crew.hand_over(3)
    for worker in crew.workers:
        assert worker.do(STANDS.format(step=3)) == ["ready", [1, 3], []]


def again(cluster: Cluster, crew: Crew, step: int) -> set[str]:
    """That step, though whoever begins it may find that its daemon has gone; the home by then."""
    for worker in crew.workers:
        worker.start(UPDATE.format(step=step, seconds=60))
    lasting(0.5)
    for writer in crew.writers:
        writer.start(
            f"rank.fill({step})\npublication = writer.publish({step}, timeout=60)\npublication.captured(timeout=60)"
        )
    raised = []
    for process in [*crew.workers, *crew.writers]:
        try:
            process.finish()
        except RemoteError as error:
            raised.append(f"{error.kind}: {error.message}")
    assert not raised, "\n".join(raised) + "".join(f"LOG {n} " + d.log()[-2500:] for n, d in cluster.daemons.items())
    running = {name: daemon for name, daemon in cluster.daemons.items() if daemon.running}
    writers = list(range(len(crew.writers)))
    return {name for name, daemon in running.items() if job_of(daemon.ask("status"), "j").get("writers") == writers}


def test_home_that_is_lost_for_good_is_replaced(own: Cluster, fork: Fork) -> None:
    crew = crew_on(own, fork, "j", "a", "b")
    crew.hand_over(1)
    crew.writers[0].kill()
    own["a"].kill()
    crew.writers[0] = fork()
    crew.writers[0].do(crew.writer(0, 1, socket=own["b"].socket))
    crew.daemon = own["b"]
    again(own, crew, 2)
    (worker,) = crew.workers
    assert worker.do(STANDS.format(step=2)) == ["ready", [1, 2], []]
    own["a"].start()


@pytest.mark.parametrize("name", ["a", "b"])
def test_daemon_that_freezes_for_a_while(own: Cluster, fork: Fork, name: str) -> None:
    crew = crew_on(own, fork, "j", "ab", "ba")
    crew.hand_over(1)
    os.kill(own[name].pid, signal.SIGSTOP)
    lasting(8)  # its word to the other daemon is missed, and to the MetaServer
    os.kill(own[name].pid, signal.SIGCONT)
    (home,) = again(own, crew, 2)
    crew.daemon = own[home]
    crew.hand_over(3)
    assert not [text for name in "ab" for text in texts(own[name], "metaserver") if "refuses" in text]


def test_metaserver_is_needed_by_those_who_come_and_by_nobody_else(own: Cluster, fork: Fork) -> None:
    crew = crew_on(own, fork, "j", "a", "b")
    crew.hand_over(1)
    own.server.kill()
    crew.hand_over(2)
    with pytest.raises(RemoteError, match=r"home of its exchanges: .*MetaServer") as caught:
        fork().do(crew.reader("late", 0, 1, socket=own["b"].socket).replace("ring_bytes", "timeout=1, ring_bytes"))
    assert caught.value.kind == "DeadlineExceeded"
    own.server.start()
    late = fork()
    late.do(crew.reader("late", 0, 1, socket=own["b"].socket))
    crew.engines["late"] = [late]
    crew.hand_over(3)
    until(own["a"], lambda status: status["metaserver"]["connected"])
    crew.hand_over(4)
    assert texts(own["a"], "failed") == []


def test_node_that_serves_no_others_is_no_home_for_them(tmp_path: Path, fork: Fork) -> None:
    with Cluster(tmp_path, "b") as cluster:
        alone = cluster.add("a", listen=False)
        crew = Crew(alone, fork, 1, [1], job="j")
        crew.hand_over(1)
        with pytest.raises(RemoteError, match=r"node a.* serves no other nodes: start its daemon with --listen"):
            together([fork()], [crew.reader("e1", 0, 1, socket=cluster["b"].socket)])
        crew.close()


def test_reader_without_nccl_on_another_node_is_told_why_nothing_comes(own: Cluster, fork: Fork) -> None:
    crew = crew_on(own, fork, "j", "a", "a")
    crew.hand_over(1)
    other = fork()
    other.do(
        "from tests.e2e.workers import weights\nheld = weights.Rank('reader', 0, 1)\n"
        f"reader = WorkerWeightsReader('j', 'other', 0, 1, {own['b'].socket!r})\nreader.register(held.shards)"
    )
    until(own["b"], lambda status: job_of(status, "j").get("elsewhere"))
    for call in ("reader.update(timeout=60)", "reader.update(1, timeout=60)", "reader.update(2, 60, overlap=True)"):
        with pytest.raises(RemoteError, match='its trainer has transport="nccl"; pass that to rank 0 of engine other'):
            other.do(call)
    crew.close()
    trainer = fork()
    trainer.do(
        "from tests.e2e.workers import weights\nrank = weights.Rank('writer', 0, 1)\nrank.fill(1)\n"
        f"writer = WeightWriter('j', 0, 1, {own['a'].socket!r}, 'new', mode='host')\nwriter.register(rank.shards)\n"
        "writer.publish(1).committed()"
    )
    assert other.do("reader.wait(1)\ndone = reader.update()\nresult = [done.step, held.wrong(1)]") == [1, []]
