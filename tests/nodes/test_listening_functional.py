"""Where a daemon listens for others: refused with a reason, or reached only by who proves a ticket."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process
from tests.nodes.clusters import Cluster, Engine, Trainer

Forks = Callable[[int], list[Process]]
META = ("--metaserver", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--listen", "127.0.0.1:0"), "give its URL too"),
        ((*META, "--listen", "0.0.0.0:0"), "advertise must say"),
        ((*META, "--listen", "192.0.2.1:7470"), "cannot listen for other nodes at 192.0.2.1 port 7470"),
    ],
)
def test_address_that_cannot_be_served_is_refused(folder: Path, arguments: tuple[str, ...], text: str) -> None:
    daemon = Daemon(folder, *arguments)
    with pytest.raises(pytest.fail.Exception):
        daemon.start()
    assert text in daemon.log()
    assert "Traceback" not in daemon.log()


def test_strangers_at_the_port_change_nothing(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(1), cluster["b"])
        trainer.publish(1)
        engine.update(1)
        host, _, port = cluster["a"].ask("status")["metaserver"]["address"].rpartition(":")
        sent = cluster["a"].ask("status")["metaserver"]["sent_bytes"]
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 65536):
            with socket.create_connection((host, int(port)), timeout=20) as stranger:
                try:
                    stranger.sendall(said)
                    if said:
                        stranger.recv(4096)
                except ConnectionError:
                    continue
        trainer.publish(2)
        engine.update(2)
        assert cluster["a"].ask("status")["metaserver"]["sent_bytes"] > sent
