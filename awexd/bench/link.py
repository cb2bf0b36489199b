"""A measured process and its link to the one that measures: JSON lines over a socket pair, one answer a request.

Only the standard library: peers' processes, in environments of their own, import this too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

END_SECONDS = 20.0
ANSWER_SECONDS = 600.0

Answer = dict[str, Any]
Operation = Callable[..., Answer | Iterator[Answer]]


class SideFailed(RuntimeError):
    """A measured process said what went wrong, ended, or did not answer in time."""


class Side:
    """A process of its own, asked over a socket pair. A context manager: leaving it ends the process.

    It is in a process group of its own, so that an interrupt from the terminal reaches only the parent, which ends it.

    Args:
        command: gets the number of its end of the link as a last argument.
        fds: further descriptors that it inherits, under the same numbers.
        patience: seconds that it may take to end when its work was interrupted.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        fds: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
        patience: float = 1.0,
    ) -> None:
        self.name = name
        self._patience = patience
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the parent's is for figures
                process_group=0,
                env=None if environ is None else os.environ | environ,
            )
        self._lines = self._socket.makefile("rb")

    def ask(self, operation: str, **arguments: Any) -> Answer:
        """One request and its answer."""
        self.tell(operation, **arguments)
        return self.answer(operation)

    def tell(self, operation: str, **arguments: Any) -> None:
        """A request whose answers are awaited later, by ``answer``."""
        try:
            self._socket.sendall(json.dumps([operation, arguments]).encode() + b"\n")
        except OSError as error:
            raise SideFailed(f"{self.name} has ended before {operation}") from error

    def answer(self, operation: str, timeout: float = ANSWER_SECONDS) -> Answer:
        """The next answer.

        Raises:
            SideFailed: it failed, ended or was late.
        """
        self._socket.settimeout(timeout)
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise SideFailed(f"{self.name} did not answer {operation} in {timeout:g} s") from error
        except ConnectionResetError:  # it has left the request unread
            line = b""
        if not line:
            raise SideFailed(f"{self.name} ended during {operation}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise SideFailed(f"{self.name}, {operation}: {answer['error']}")
        return answer

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. What it had answered by then can still be read."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lines.close()
        self._socket.close()  # it reads the end of its requests, and ends
        try:
            self._process.wait(END_SECONDS if kind is None else self._patience)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Whatever it started is in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def serve(link: int, operations: Mapping[str, Operation]) -> None:
    """Answers requests until the link closes. An operation that yields gives several answers.

    An exception is told over the link, by its type and text; the process then ends with it.
    """
    with socket.socket(fileno=link) as ours, ours.makefile("rb") as lines:
        for line in lines:
            operation, arguments = json.loads(line)
            try:
                found = operations[operation](**arguments)
                for answer in [found] if isinstance(found, dict) else found:
                    ours.sendall(json.dumps(answer).encode() + b"\n")
            except Exception as error:
                with contextlib.suppress(OSError):
                    ours.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
                raise


def nanoseconds() -> int:
    """One clock for all processes of a Linux host."""
    return time.monotonic_ns()
