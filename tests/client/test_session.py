"""The connection, against listeners that do not behave like a daemon, and with odd timeouts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from awexd.protocol import encode, hello
from awexd_client import (
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    ProtocolError,
    WeightWriter,
    WorkerWeightsReader,
)
from awexd_client.session import Connection
from tests.daemons import Daemon

BOUND = 20.0
"""Seconds; generous: what is shown is that it ends."""

Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """Serves one connection with a function; gives the path."""
    path = str(folder / "odd")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    threads: list[threading.Thread] = []

    def start(behaviour: Callable[[socket.socket], None]) -> str:
        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                behaviour(sock)

        threads.append(threading.Thread(target=run))
        threads[0].start()
        return path

    yield start
    for thread in threads:
        thread.join(BOUND)
    listener.close()


def test_daemon_that_goes_away_before_its_hello(serve: Serve) -> None:
    path = serve(lambda sock: None)
    with pytest.raises(DaemonUnavailable):
        Connection(path, timeout=2)


def hear_and_say(sock: socket.socket, answer: bytes) -> None:
    sock.recv(4096)
    sock.sendall(answer)


def say_nothing(sock: socket.socket) -> None:
    while sock.recv(4096):
        pass


def test_daemon_that_never_greets(serve: Serve) -> None:
    path = serve(say_nothing)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        Connection(path, timeout=0.2)
    assert time.monotonic() - started < BOUND


def test_daemon_of_another_protocol_version(serve: Serve) -> None:
    path = serve(lambda sock: hear_and_say(sock, encode({"hello": {"protocol": 999}})))
    with pytest.raises(ProtocolError, match="same awexd version"):
        Connection(path, timeout=BOUND)


@pytest.mark.parametrize("answer", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00[]", b"\x03\x00\x00\x00{{{"], ids=repr)
def test_answer_that_is_no_frame(serve: Serve, answer: bytes) -> None:
    path = serve(lambda sock: hear_and_say(sock, answer))
    with pytest.raises(ProtocolError):
        Connection(path, timeout=BOUND)


def test_answer_that_never_comes(serve: Serve) -> None:
    def greet_and_listen(sock: socket.socket) -> None:
        sock.sendall(encode(hello("0")))
        while sock.recv(4096):
            pass

    connection = Connection(serve(greet_and_listen))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="status"):
        connection.call("status", {}, timeout=0.1)
    assert time.monotonic() - started < BOUND
    connection.close()


def test_connection_that_breaks_wakes_every_waiting_thread(serve: Serve) -> None:
    broken = threading.Event()

    def greet_and_go(sock: socket.socket) -> None:
        sock.sendall(encode(hello("0")))
        broken.wait(BOUND)

    connection = Connection(serve(greet_and_go))
    errors: list[AwexdError] = []

    def ask() -> None:
        try:
            connection.call("status", {}, timeout=BOUND)
        except AwexdError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    broken.set()
    for thread in threads:
        thread.join(BOUND)
    assert [type(error) for error in errors] == [DaemonUnavailable] * 4
    connection.close()


def test_many_threads_share_a_connection(daemon: Daemon) -> None:
    connection = Connection(daemon.socket)
    answers: list[int] = []

    def ask() -> None:
        for _ in range(50):
            answers.append(connection.call("status", {}, timeout=BOUND)[0]["pid"])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert answers == [daemon.pid] * 300
    connection.goodbye()


@pytest.mark.parametrize("timeout", [float("nan"), -1, "5", None], ids=str)
def test_timeout_that_is_none(daemon: Daemon, timeout: Any) -> None:
    with (
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register({"w": torch.zeros(1)})
        reader.register({"w": torch.zeros(1)})
        for call in (
            lambda: writer.publish(1, timeout=timeout),
            lambda: reader.update(timeout=timeout),
            lambda: reader.wait(1, timeout=timeout),
        ):
            with pytest.raises(InvalidArgument, match="timeout"):
                call()
        writer.publish(1, timeout=BOUND)
        assert reader.update(timeout=BOUND).step == 1


@pytest.mark.parametrize("timeout", [float("inf"), 1e6, 1e300], ids=str)
def test_timeout_of_more_than_a_day(daemon: Daemon, timeout: float) -> None:
    with (
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register({"w": torch.zeros(1)}, timeout=timeout)
        reader.register({"w": torch.zeros(1)}, timeout=timeout)
        writer.publish(1, timeout=timeout).committed(timeout)
        assert reader.wait(1, timeout=timeout) == (1, 1)
        assert reader.update(timeout=timeout).step == 1
