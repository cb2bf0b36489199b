"""A client that may misbehave: bytes and descriptors straight to the daemon's socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from awexd.manifests import sealed_memfd
from awexd.protocol import OPERATIONS, Decoder, Message, encode, hello
from awexd_transports.errors import AwexdError, from_wire
from awexd_transports.layout import body_digest

SECONDS = 20.0
DEADLINE_MS = 20_000
DONE: dict[str, Any] = {"nbytes": 1, "stage_us": 1, "pause_us": 1}
"""What a worker says of an update."""


class Raw:
    """One connection. A context manager."""

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self._decoder = Decoder()
        self._messages: list[tuple[Message, list[int]]] = []
        self._ids = iter(range(1, 1 << 30))
        self.sock.connect(path)
        if greet:
            self.send(encode(hello("test", pid=os.getpid())))
            answer = self.receive()
            if "bye" in answer:
                self.close()
                raise from_wire(answer["bye"]["code"], answer["bye"]["reason"], {})
            self.session = answer["hello"]["session"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        self._decoder.close()
        for _, fds in self._messages:
            for fd in fds:
                os.close(fd)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        sent = socket.send_fds(self.sock, [data], list(fds)) if fds else 0
        self.sock.sendall(data[sent:])

    def receive_with_fds(self) -> tuple[Message, list[int]]:
        """The next message; EOFError once the daemon has closed the connection."""
        while not self._messages:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 128)
            if not data:
                raise EOFError
            self._messages += self._decoder.feed(data, fds)
        return self._messages.pop(0)

    def receive(self) -> Message:
        message, fds = self.receive_with_fds()
        for fd in fds:
            os.close(fd)
        return message

    def end(self) -> Message:
        """What the daemon says before it closes this connection: its bye, or nothing."""
        said: Message = {}
        try:
            while True:
                message = self.receive()
                said = message if "bye" in message else said
        except (EOFError, ConnectionResetError):
            return said

    def ask(
        self, operation: str, *, body: bytes | None = None, deadline_ms: int = DEADLINE_MS, **arguments: Any
    ) -> int:
        """Sends a request, its optional arguments left empty; its id.

        ``body`` travels as a sealed memfd, and its digest is added where none is given.
        """
        number = next(self._ids)
        optional = (name for name, check in OPERATIONS[operation].items() if name != "digest" and check(None))
        arguments |= {name: None for name in optional if name not in arguments}
        if operation == "write.register":
            arguments = {"mode": "host", "lends": False} | arguments
        message: Message = {"id": number, "op": operation, "args": arguments, "deadline_ms": deadline_ms}
        if body is None:
            self.send(encode(message))
            return number
        arguments.setdefault("digest", body_digest(body))
        fd = sealed_memfd("test", [body])
        try:
            self.send(encode(message | {"fds": 1}), [fd])
        finally:
            os.close(fd)
        return number

    def answer(self, number: int) -> tuple[Message, list[int]]:
        """The result of that request.

        Raises:
            AwexdError: what the daemon answered.
        """
        while True:
            message, fds = self.receive_with_fds()
            if message.get("id") == number:
                break
            for fd in fds:
                os.close(fd)
        if "error" in message:
            error = message["error"]
            raise from_wire(error["code"], error["message"], error["details"])
        return message["ok"], fds

    def call(self, operation: str, *, body: bytes | None = None, **arguments: Any) -> Message:
        result, fds = self.answer(self.ask(operation, body=body, **arguments))
        for fd in fds:
            os.close(fd)
        return result

    def refused(self, operation: str, *, body: bytes | None = None, **arguments: Any) -> AwexdError:
        """The error that the daemon answers."""
        try:
            result = self.call(operation, body=body, **arguments)
        except AwexdError as error:
            return error
        raise AssertionError(f"{operation} was not refused: {result}")


class RawWriter(Raw):
    """A registered writer, with memory. Its manifest is bytes that nobody reads."""

    def __init__(self, path: str, job: str = "j", *, rank: int = 0, size: int = 1, nbytes: int = 8192) -> None:
        super().__init__(path)
        self.job, self.rank, self.size, self.nbytes = job, rank, size, nbytes
        self.set = ""

    def register(self, epoch: str | int = "continue", keep: int = 2) -> None:
        body = b"manifest of rank %d" % self.rank
        self.call(
            "write.register",
            body=body,
            job=self.job,
            rank=self.rank,
            world_size=self.size,
            epoch=epoch,
            keep=keep,
        )

    def reserve(self) -> None:
        self.set = self.call("write.ready")["set"]
        body = b"segment of rank %d" % self.rank
        self.segments = self.call("write.reserve", body=body, set=self.set, nbytes=self.nbytes)["segments"]

    def begin(self, step: int) -> Message:
        return self.call("write.begin", step=step, set=self.set)

    def seal(self, begun: Message, step: int) -> Message:
        return self.call("write.seal", epoch=begun["epoch"], step=step, attempt=begun["attempt"], checksums=False)

    def publish(self, step: int) -> Message:
        begun = self.begin(step)
        self.seal(begun, step)
        return begun

    @contextmanager
    def opened(self, segment: str) -> Iterator[int]:
        """A descriptor of that segment."""
        _, (fd,) = self.answer(self.ask("segment.open", ids=[segment]))
        try:
            yield fd
        finally:
            os.close(fd)


def writer(path: str, job: str = "j", **options: Any) -> RawWriter:
    """A lone rank, ready to publish."""
    made = RawWriter(path, job, **options)
    made.register()
    made.reserve()
    return made


def reader(path: str, job: str = "j", engine: str = "e", rank: int = 0, size: int = 1) -> Raw:
    """A registered worker."""
    made = Raw(path)
    made.call(
        "read.register",
        body=b"worker",
        job=job,
        engine=engine,
        rank=rank,
        world_size=size,
    )
    return made


def until(path: str, condition: Any, seconds: float = 10.0) -> Message:
    """The daemon's status once ``condition`` of it holds: nothing tells a bystander that a session has ended."""
    end = time.monotonic() + seconds
    with Raw(path) as raw:
        while True:
            status = raw.call("status")
            if condition(status):
                return status
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {status}")
