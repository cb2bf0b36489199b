"""The demo's child processes: started on a leash, watched all the time, and ended together."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from awexd.demo.wire import Channel, Message
from awexd_transports.errors import AwexdError, DeadlineExceeded

FAREWELL_SECONDS = 10.0
KILL_SECONDS = 5.0
CAUSE_SECONDS = 0.5
LOG_LINES = 12
LOG_BYTES = 8192


class ChildFailed(AwexdError):
    """A process of the demo ended, or could not do its part; the message names it and quotes its log."""

    code = "child_failed"


@dataclass(eq=False)
class Child:
    """One process; `channel` is the parent's end of its socket pair, or None where nothing is asked of it.

    ``finishes``: it has a task, and ends with status 0 once that is done; no other child may end by itself.
    """

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    log: Path
    channel: Channel | None = None
    finishes: bool = False
    ended: bool = field(default=False, init=False)

    def describe_end(self) -> str:
        """How it ended, for an error message. It must have, or be about to."""
        try:
            code = self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} (process {self.process.pid}) closed its channel"
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"{self.name} (process {self.process.pid}) {end}"

    def last_lines(self) -> str:
        """The end of what it wrote to its standard error, indented; empty if nothing."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            return "".join(f"\n    {line}" for line in lines)
        return ""


class Children:
    """All processes of one run. Leaving the context ends those that are left and waits for each."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(self._children, at_once=kind is not None)
        self._selector.close()

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        answers: bool = False,
        outlives: bool = False,
        finishes: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts ``python -m module`` in a session of its own, so that Ctrl-C reaches the parent only.

        Args:
            answers: it gets ``--channel``, one end of a socket pair.
            outlives: the end of this process does not end it.
            finishes: it ends by itself; see `finish`.
        """
        leash = [] if outlives else [sys.executable, "-m", "awexd.demo.leash", str(os.getpid())]
        command = [*leash, sys.executable, "-m", module, *arguments]
        ours, theirs = socket.socketpair() if answers else (None, None)
        log = self._directory / f"{name}.log"
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb"))
            if theirs is not None:
                stack.enter_context(theirs)
                command += ["--channel", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[] if theirs is None else [theirs.fileno()],
                env=self._environment | dict(environment or {}),
                start_new_session=True,
            )
        child = Child(name, process, os.pidfd_open(process.pid), log, None if ours is None else Channel(ours), finishes)
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        return child

    def ask(self, children: Sequence[Child], request: Message, phase: str, within: float) -> list[Message]:
        """Sends one request to several children and returns their replies in that order.

        Raises:
            ChildFailed: one of them answered with an error, or any child of the run ended.
            DeadlineExceeded: not all have answered in time.
        """
        replies: dict[str, Message] = {}
        for child in children:
            _send(child, request, phase)
        waiting = {child.channel: child for child in children if child.channel is not None}
        for channel, child in waiting.items():
            self._selector.register(channel, selectors.EVENT_READ, child)
        try:
            deadline = time.monotonic() + within
            while len(replies) < len(waiting):
                late = [child.name for child in children if child.name not in replies]
                for source in self._select(deadline, ", ".join(late), phase):
                    child = waiting[source]
                    replies[child.name] = self._receive(child, phase, deadline)
                    self._selector.unregister(source)
        finally:
            for channel in waiting:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(channel)
        return [replies[child.name] for child in children]

    def wait_readable(self, source: socket.socket, name: str, phase: str, within: float) -> None:
        """Waits until ``source`` has something to read; ``name`` is who should write it."""
        deadline = time.monotonic() + within
        self._selector.register(source, selectors.EVENT_READ, None)
        try:
            while source not in self._select(deadline, name, phase):
                continue
        finally:
            self._selector.unregister(source)

    def finish(self, child: Child, phase: str, within: float) -> None:
        """Waits for the end of a child that ends by itself.

        Raises:
            ChildFailed, DeadlineExceeded: as `ask`.
        """
        deadline = time.monotonic() + within
        while not child.ended:
            self._select(deadline, child.name, phase)

    def end(self, children: Sequence[Child], *, at_once: bool) -> None:
        """Ends children: those with a channel by closing it, the others by SIGTERM; then SIGKILL for who stays.

        ``at_once`` sends SIGTERM to all, because one may be in the middle of something.
        """
        going = [child for child in children if not child.ended]
        for child in going:
            if child.channel is not None:
                child.channel.close()
            if at_once or child.channel is None:
                child.process.terminate()
        deadline = time.monotonic() + FAREWELL_SECONDS
        for child in going:
            self._reap(child, deadline)

    def _reap(self, child: Child, deadline: float) -> None:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait(KILL_SECONDS)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.pidfd)
        self._release(child)

    def _release(self, child: Child) -> None:
        os.close(child.pidfd)
        child.ended = True
        if child.channel is not None:
            child.channel.close()

    def _select(self, deadline: float, names: str, phase: str) -> list[Any]:
        """What can be read, channels and others; it may be nothing.

        A child that has ended raises, unless that is what it is for, or its last words are still to be read.
        """
        events = self._selector.select(max(0.0, deadline - time.monotonic()))
        if not events:
            raise DeadlineExceeded(f"{phase}: {names} did not answer in time")
        ready = [key.fileobj for key, _ in events if not isinstance(key.fileobj, int)]
        for key, _ in events:
            if isinstance(key.fileobj, int):
                self._notice_end(key.data, phase, tolerate=bool(ready))
        return ready

    def _notice_end(self, child: Child, phase: str, *, tolerate: bool) -> None:
        if child.finishes and child.process.wait(KILL_SECONDS) == 0:
            self._selector.unregister(child.pidfd)
            self._release(child)
        elif not tolerate:
            raise _ended(child, phase)

    def _receive(self, child: Child, phase: str, deadline: float) -> Message:
        try:
            reply = _channel(child).receive(max(0.0, deadline - time.monotonic()))
        except EOFError:
            raise _ended(child, phase) from None
        except TimeoutError:
            raise DeadlineExceeded(f"{phase}: {child.name} began to answer and did not finish in time") from None
        if "error" in reply:
            raise self._killed_before(child, phase) or ChildFailed(f"{phase}: {child.name}: {reply['error']}")
        result: Message = reply["result"]
        return result

    def _killed_before(self, child: Child, phase: str) -> ChildFailed | None:
        """The error of another child that was killed: a trainer whose peer is gone fails too, and may say so first."""
        others = {other.pidfd: other for other in self._children if not other.ended and other is not child}
        ended, _, _ = select.select(list(others), [], [], CAUSE_SECONDS)
        killed = [others[pidfd] for pidfd in ended if others[pidfd].process.wait(KILL_SECONDS) < 0]
        return _ended(killed[0], phase) if killed else None


def _ended(child: Child, phase: str) -> ChildFailed:
    return ChildFailed(f"{phase}: {child.describe_end()}{child.last_lines()}")


def _send(child: Child, request: Message, phase: str) -> None:
    channel = _channel(child)
    try:
        channel.send(request)
    except (BrokenPipeError, ConnectionResetError):
        raise _ended(child, phase) from None


def _channel(child: Child) -> Channel:
    if child.channel is None:
        raise ValueError(f"{child.name} has no channel")
    return child.channel
