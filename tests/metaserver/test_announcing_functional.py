"""Daemons and their MetaServer: what it is told, and what happens when one of them is away."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from awexd_client import WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon
from tests.metaserver.servers import Client, MetaServer

DEADLINE = 30.0
JOB = f"{getpass.getuser()}/j"


@pytest.fixture
def short_lived(folder: Path) -> Iterator[MetaServer]:
    with MetaServer(folder, "--node-ttl", "1") as running:
        yield running


def node(folder: Path, server: MetaServer, name: str, *more: str) -> Daemon:
    own = folder / name
    own.mkdir(exist_ok=True)
    return Daemon(own, "--metaserver", server.url, "--node", name, "--advertise", f"{name}:7470", *more)


def until(server: MetaServer, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The cluster's status, once it is so; told by its events, not by the clock."""
    end = time.monotonic() + DEADLINE
    with Client(server) as client:
        while True:
            seq = client.call("status")["seq"]
            status: dict[str, Any] = client.call("status")
            if true(status):
                return status
            assert time.monotonic() < end, status
            client.call("events", query={"after": seq, "timeout_ms": 50})


def job_of(status: dict[str, Any], name: str = JOB) -> dict[str, Any]:
    found = [job for job in status["jobs"] if job["job"] == name]
    return found[0] if found else {}


def events_of(daemon: Daemon) -> list[str]:
    return [event["text"] for event in daemon.ask("events", job=None, after=None)["events"]]


def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "awexd.ctl", *arguments], capture_output=True, text=True, timeout=60)


def test_a_daemon_tells_what_it_has_and_what_changes(folder: Path, metaserver: MetaServer) -> None:
    with node(folder, metaserver, "n0") as daemon:
        until(metaserver, lambda status: [one["node"] for one in status["nodes"]] == ["n0"])
        assert daemon.ask("status")["metaserver"] == {
            "url": metaserver.url, "node": "n0", "connected": True, "problem": None, "address": "n0:7470",
            "sent_bytes": 0,
            "routes": [],
        }  # fmt: skip
        with (
            WeightWriter("j", 0, 1, daemon.socket) as writer,
            WorkerWeightsReader("j", "e", 0, 1, daemon.socket) as reader,
        ):
            writer.register({"a": torch.ones(1000)})
            reader.register({"a": torch.zeros(1000)})
            for step in (1, 2, 3):
                writer.publish(step).committed()
            until(metaserver, lambda status: job_of(status).get("last_step") == 3)
            reader.update()
            with Client(metaserver) as client:
                until(metaserver, lambda _: _workers(client) == [("ready", [1, 3])])
                seen = client.call("job", job=JOB)
                assert [(one["step"], one["holders"]) for one in seen["pieces"]] == [(3, {"n0": [0]}), (2, {"n0": [0]})]
                digests = {row["digest"] for row in seen["ranks"]} | {
                    row[1] for one in seen["pieces"] for row in one["pieces"]
                }
                assert client.call("missing", {"digests": sorted(digests)}) == {"missing": []}
            text = ctl("status", "--metaserver", metaserver.url)
            assert (text.returncode, text.stderr) == (0, "")
            for part in ("n0:7470", f"job {JOB}: epoch 1, writers 1 of 1", "version 1.3 held by: n0", "engine e on n0"):
                assert part in text.stdout
            shown = json.loads(ctl("status", "--metaserver", metaserver.url, "--json").stdout)
            assert shown["jobs"][0]["brief"]["last_step"] == 3
            told = ctl("events", "--metaserver", metaserver.url, "--job", JOB)
            assert "epoch 1 step 3 committed on n0" in told.stdout
            assert "announced" in ctl("status", "--socket", daemon.socket).stdout
            writer.close_job()
            until(metaserver, lambda status: not job_of(status))
    assert until(metaserver, lambda status: not status["nodes"])
    assert ctl("status", "--metaserver", "http://127.0.0.1:1").returncode == 1


def _workers(client: Client) -> list[tuple[str, list[int]]]:
    engines = client.call("job", job=JOB)["engines"]
    return [(worker["state"], worker["version"]) for engine in engines for worker in engine["workers"]]


def test_after_a_restart_of_the_metaserver_all_is_announced_again(folder: Path, metaserver: MetaServer) -> None:
    with ExitStack() as stack:
        daemons = [stack.enter_context(node(folder, metaserver, f"n{number}")) for number in range(2)]
        writers = [stack.enter_context(WeightWriter(f"j{at}", 0, 1, one.socket)) for at, one in enumerate(daemons)]
        for writer in writers:
            writer.register({"a": torch.ones(1000)})
            writer.publish(1).committed()
        until(metaserver, lambda status: all(job_of(status, f"{JOB}{at}").get("last_step") == 1 for at in (0, 1)))
        metaserver.kill()
        for writer in writers:  # nobody waits for it
            writer.publish(2).committed(timeout=10)
        metaserver.start()
        status = until(
            metaserver,
            lambda status: (
                len(status["nodes"]) == 2 and all(job_of(status, f"{JOB}{at}").get("last_step") == 2 for at in (0, 1))
            ),
        )
        for at in (0, 1):
            versions = job_of(status, f"{JOB}{at}")["versions"]
            assert [(step, held) for _, step, _, held in versions] == [(2, True), (1, True)]
        for daemon in daemons:
            texts = events_of(daemon)
            assert sum(text.startswith("announced to the MetaServer") for text in texts) == 2
            assert sum("this node's own jobs go on without it" in text for text in texts) >= 1
        for writer in writers:
            writer.close_job()


def test_a_node_by_itself_goes_on_while_the_metaserver_was_never_there(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Daemon(folder, "--metaserver", f"http://127.0.0.1:{port}") as daemon:
        with WeightWriter("j", 0, 1, daemon.socket) as writer:
            writer.register({"a": torch.ones(1000)})
            writer.publish(1).committed(timeout=10)
            writer.close_job()
        told = daemon.ask("status")["metaserver"]
        assert told["connected"] is False
        assert str(port) in told["problem"]


def test_a_metaserver_that_answers_nothing_holds_nobody_up(folder: Path) -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        daemon = stack.enter_context(Daemon(folder, "--metaserver", f"http://127.0.0.1:{silent.getsockname()[1]}"))
        asked, _ = silent.accept()
        with asked, WeightWriter("j", 0, 1, daemon.socket) as writer:
            writer.register({"a": torch.ones(1000)})
            writer.publish(1).committed(timeout=10)
            writer.close_job()
        asked, _ = silent.accept()
        with asked:
            asked.recv(4096)
            asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            _until_event(daemon, "no MetaServer")


def _until_event(daemon: Daemon, text: str) -> None:
    last = daemon.ask("events", job=None, after=None)
    while not any(text in event["text"] for event in last["events"]):
        last = daemon.ask("events", job=None, after=last["last"])


def test_a_killed_daemon_is_gone_after_its_ttl_and_back_with_what_it_held(
    folder: Path, short_lived: MetaServer
) -> None:
    with node(folder, short_lived, "n0") as daemon:
        with WeightWriter("j", 0, 1, daemon.socket) as writer:
            writer.register({"a": torch.ones(1000)})
            writer.publish(1).committed()
        until(short_lived, lambda status: job_of(status).get("last_step") == 1)
        daemon.kill()
        gone = until(short_lived, lambda status: not status["nodes"])
        assert job_of(gone)["versions"][0][3] is False
        daemon.start()
        back = until(short_lived, lambda status: status["nodes"] and job_of(status)["versions"][0][3])
        assert (job_of(back)["epoch"], job_of(back)["last_step"]) == (1, 1)


def test_a_job_of_the_same_name_on_a_second_node_is_refused_there_and_goes_on(
    folder: Path, metaserver: MetaServer
) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(node(folder, metaserver, name)) for name in ("n0", "n1"))
        one, other = (stack.enter_context(WeightWriter("j", 0, 1, daemon.socket)) for daemon in (first, second))
        one.register({"a": torch.ones(1000)})
        until(metaserver, lambda status: job_of(status).get("epoch") == 1)
        other.register({"a": torch.ones(1000)})
        other.publish(1).committed(timeout=10)
        _until_event(second, "has writers on node n0")
        one.publish(1).committed()
        until(metaserver, lambda status: job_of(status).get("last_step") == 1)
        one.close_job()
        other.close_job()


@pytest.mark.parametrize(("token", "starts"), [("node", True), ("reader", False), ("", True)])
def test_a_daemon_shows_its_token(folder: Path, token: str, starts: bool) -> None:
    secret = "a-secret-of-the-tests"
    theirs = folder / "theirs"
    theirs.touch(0o600)
    theirs.write_text(f"node {secret}\nreader {secret}-r\n")
    ours = folder / "ours"
    ours.touch(0o600)
    ours.write_text(f"{token} {secret if token == 'node' else secret + '-r'}\n")
    with MetaServer(folder, "--token-file", str(theirs)) as server:
        arguments = ["--token-file", str(ours)] if token else []
        daemon = node(folder, server, "n0", *arguments)
        if not starts:
            with pytest.raises(pytest.fail.Exception):
                daemon.start()
            assert "no token of the role node" in daemon.log()
            return
        with daemon:
            _until_event(daemon, "announced to the MetaServer" if token else "a bearer token is wanted")
            assert daemon.ask("status")["metaserver"]["connected"] is bool(token)
            assert secret not in daemon.log() + server.log() + json.dumps(daemon.ask("status"))


def test_a_node_that_shares_its_name_is_told_so(folder: Path, metaserver: MetaServer) -> None:
    (folder / "other").mkdir()
    arguments = ("--metaserver", metaserver.url, "--node", "n0", "--advertise", "elsewhere:1")
    with node(folder, metaserver, "n0") as first, Daemon(folder / "other", *arguments) as second:
        _until_event(first, "announced")
        _until_event(second, "choose another --node")
