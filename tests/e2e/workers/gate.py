"""A relay between clients and the daemon that holds one message back, so that something can be done between two."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from awexd.protocol import MAX_FDS, Decoder, encode

PATIENCE = 60.0


@dataclass
class Stop:
    """One message that is held: ``reached`` is set when it has come, ``release`` lets it go on (or drops it)."""

    operation: str
    reply: bool
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False

    def wait(self) -> None:
        if not self.reached.wait(PATIENCE):
            raise TimeoutError(f"{self.operation} never came")

    def release(self, *, drop: bool = False) -> None:
        self.dropped = drop
        self.go.set()


class Gate:
    """Listens at ``path`` and passes every connection on to ``upstream``, descriptors too. A context manager."""

    def __init__(self, path: str, upstream: str) -> None:
        self.path = path
        self._upstream = upstream
        self._stops: list[Stop] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()

    def stop_at(self, operation: str, *, reply: bool) -> Stop:
        """The next such request, or the reply to it, is held."""
        stop = Stop(operation, reply)
        with self._lock:
            self._stops.append(stop)
        return stop

    def cut(self) -> None:
        """Breaks every connection; both sides live on, and the clients may come again."""
        for sock in list(self._sockets):
            _shut(sock)

    def __enter__(self) -> Gate:
        self._thread(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for stop in self._stops:
                stop.release(drop=True)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE)
        for sock in self._sockets:
            sock.close()

    def _thread(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="gate")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sockets += [client, daemon]
            try:
                daemon.connect(self._upstream)
            except OSError:
                _shut(client)
                continue
            asked: dict[int, str] = {}
            self._thread(self._pump, client, daemon, asked, False)
            self._thread(self._pump, daemon, client, asked, True)

    def _pump(self, source: socket.socket, sink: socket.socket, asked: dict[int, str], reply: bool) -> None:
        decoder = Decoder()
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(source, 1 << 16, MAX_FDS)
                if not data:
                    return
                for message, own in decoder.feed(data, fds):
                    self._pass(message, own, sink, asked, reply)
        except OSError:
            return
        finally:
            decoder.close()
            _shut(source)
            _shut(sink)

    def _pass(
        self, message: dict[str, Any], fds: list[int], sink: socket.socket, asked: dict[int, str], reply: bool
    ) -> None:
        number = message.get("id", -1)
        operation = asked.pop(number, "") if reply else str(message.get("op"))
        if not reply:
            asked[number] = operation
        try:
            stop = self._held(operation, reply)
            if stop is not None:
                stop.reached.set()
                stop.go.wait(PATIENCE)
                if stop.dropped:
                    return
            frame = encode(message)
            sent = socket.send_fds(sink, [frame], fds) if fds else sink.send(frame)
            sink.sendall(frame[sent:])
        finally:
            for fd in fds:
                os.close(fd)

    def _held(self, operation: str, reply: bool) -> Stop | None:
        with self._lock:
            for stop in self._stops:
                if (stop.operation, stop.reply) == (operation, reply) and not stop.reached.is_set():
                    return stop
        return None


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed, or never connected
        sock.shutdown(socket.SHUT_RDWR)
