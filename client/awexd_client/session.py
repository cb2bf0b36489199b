"""One connection to the daemon, blocking and thread-safe: several threads may wait on it for different things."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from awexd import __version__
from awexd.config import check_socket_path, default_socket
from awexd.protocol import (
    ANCILLARY_BYTES,
    MAX_DEADLINE_MS,
    RECEIVE_BYTES,
    Decoder,
    Message,
    check_hello,
    close_descriptors,
    descriptors_in,
    encode,
    hello,
)
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
    from_wire,
)

CONNECT_SECONDS = 10.0
ANSWER_GRACE_SECONDS = 2.0
"""How long after a request's deadline the daemon's own answer to it is still awaited."""

_TRUNCATED, _CLOSED_BY_EXEC = int(socket.MSG_CTRUNC), int(socket.MSG_CMSG_CLOEXEC)  # as enumerations they are slow

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def socket_path(path: str | os.PathLike[str] | None) -> str:
    """The argument, else ``$AWEXD_SOCKET``, else the default.

    Raises:
        InvalidArgument: longer than the kernel takes.
    """
    found = os.fspath(path) if path is not None else os.environ.get("AWEXD_SOCKET") or default_socket(os.environ)
    check_socket_path(found)
    return found


class NoAnswer(DeadlineExceeded):
    """The daemon said nothing in time: whether it will do what it was asked is not known."""


@dataclass(slots=True)
class Asked:
    """A request that was sent; ``reply`` comes with the messages that any thread receives.

    Attributes:
        timeout, deadline: seconds given to the daemon, and the moment up to which its answer is awaited.
        patient: nobody minds if another thread hears of it first.
    """

    id: int
    operation: str
    timeout: float
    deadline: float
    reply: Message | None = None
    fds: list[int] = field(default_factory=list)
    patient: bool = False


class Connection:
    """Connects and greets; owns its socket. Closing it ends the session: the daemon releases all that it held.

    Raises:
        DaemonUnavailable: nobody listens there.
        AccessDenied: the socket may not be opened, or the daemon does not serve this user.
        ProtocolError: the other side speaks another protocol.
        DeadlineExceeded: no greeting in time.
    """

    def __init__(self, path: str, timeout: float = CONNECT_SECONDS) -> None:
        self.path = path
        self.dropped: set[str] = set()
        self._ids = itertools.count(1)
        self._decoder = Decoder()
        self._pending: dict[int, Asked] = {}
        self._sending = threading.Lock()
        self._turn = threading.RLock()
        self._answered = threading.Condition(self._turn)
        self._reading = False
        self._patient = False
        """Whoever reads is: it leaves that to the first who is not, so that those need not be woken by it."""
        self._hurried = 0
        self._over: AwexdError | None = None
        self._inbox: list[tuple[Message, list[int]]] = []
        self._sock = _connect(path, timeout)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._readable = select.poll()
        self._readable.register(self._sock, select.POLLIN)
        self._interruptible = select.poll()
        for fd in (self._sock.fileno(), self._wake):
            self._interruptible.register(fd, select.POLLIN)
        try:
            self.daemon = self._greet(time.monotonic() + timeout, timeout)
        except BaseException:
            self._release()
            raise
        _connections.add(self)

    @property
    def over(self) -> bool:
        """The connection cannot be used any more."""
        return self._over is not None

    def call(
        self,
        operation: str,
        arguments: Message,
        *,
        timeout: float,
        grace: float = ANSWER_GRACE_SECONDS,
        fds: Sequence[int] = (),
        patient: bool = False,
    ) -> tuple[Message, list[int]]:
        """One request and its answer. ``fds`` stay the caller's; descriptors of the answer become the caller's.

        Raises:
            AwexdError: what the daemon answered.
            DaemonUnavailable: the connection broke.
            DeadlineExceeded: the daemon did not answer in time.
        """
        asked = self.ask(operation, arguments, timeout=timeout, grace=grace, fds=fds)
        asked.patient = patient
        return self.answer(asked)

    def ask(
        self,
        operation: str,
        arguments: Message,
        *,
        timeout: float,
        grace: float = ANSWER_GRACE_SECONDS,
        fds: Sequence[int] = (),
    ) -> Asked:
        """Sends a request; its answer is for ``answer``, or for ``take``.

        Raises:
            DaemonUnavailable: the connection broke; whether the daemon has it is not known.
        """
        asked = Asked(next(self._ids), operation, timeout, time.monotonic() + timeout + grace)
        milliseconds = max(0, min(int(timeout * 1000), MAX_DEADLINE_MS))
        message: Message = {"id": asked.id, "op": operation, "args": arguments, "deadline_ms": milliseconds}
        if fds:
            message["fds"] = len(fds)
        self._pending[asked.id] = asked
        try:
            self._send(encode(message), fds, asked.deadline)
        except BaseException:
            self._pending.pop(asked.id, None)
            raise
        return asked

    def tell(self, operation: str, arguments: Message, *, timeout: float) -> None:
        """Sends a request whose answer nobody waits for.

        Raises:
            DaemonUnavailable: the connection broke.
        """
        self._pending.pop(self.ask(operation, arguments, timeout=timeout).id, None)

    def answer(self, asked: Asked) -> tuple[Message, list[int]]:
        """Waits for the answer to what was asked; raises as ``call`` does."""
        try:
            self._await(asked)
        finally:
            self._pending.pop(asked.id, None)
        if asked.reply is None:
            raise self._over or DaemonUnavailable("the connection is closed")
        return _result(asked.reply), asked.fds

    def take(self, asked: Asked) -> Message | None:
        """The answer to what was asked, if it is there; None where it was refused, or has not come and is given up."""
        asked.deadline = 0.0
        with contextlib.suppress(AwexdError):
            return self.answer(asked)[0]
        return None

    def take_dropped(self) -> list[str]:
        """Ids of replaced segments that the daemon has named since this was last asked."""
        with self._turn:
            taken, self.dropped = sorted(self.dropped), set()
        return taken

    def close(self) -> None:
        """Ends the session without a word; see ``goodbye``."""
        self._end(DaemonUnavailable("this client was closed"))
        _connections.discard(self)
        with self._turn:
            if not self._reading:
                self._release()

    def goodbye(self) -> None:
        """Ends the session in order: tells the daemon that this process has unmapped everything."""
        if not self.over:
            with contextlib.suppress(AwexdError):  # it goes all the same; the daemon sees the connection's end
                self.call("goodbye", {}, timeout=ANSWER_GRACE_SECONDS)
        self.close()

    def _greet(self, deadline: float, timeout: float) -> Message:
        with contextlib.suppress(DaemonUnavailable):  # a refusal may have come before the end: read it first
            self._send(encode(hello(__version__, pid=os.getpid())), (), deadline)
        while not self._inbox:
            if not self._over and not _ready(self._readable, deadline):
                raise DeadlineExceeded(f"the daemon at {self.path} did not greet within {timeout:g} s")
            self._receive()
            if self._over and not self._inbox:
                raise self._over
        message, _ = self._inbox.pop(0)
        if "bye" in message:
            raise _refusal(message, self.path)
        return check_hello(message)

    def _send(self, frame: bytes, fds: Sequence[int], deadline: float) -> None:
        view = memoryview(frame)
        with self._sending:
            while view:
                if self._over:
                    raise self._over
                try:
                    sent = socket.send_fds(self._sock, [view], fds) if fds else self._sock.send(view)
                    view, fds = view[sent:], ()
                except BlockingIOError:
                    if not self._writable(deadline):
                        error = DaemonUnavailable(f"the daemon at {self.path} takes no more requests")
                        self._end(error)
                        raise error from None
                except OSError as error:
                    self._end(DaemonUnavailable(f"the daemon at {self.path} went away: {error.strerror}"))

    def _await(self, asked: Asked) -> None:
        """Waits for the answer. One of the waiting threads reads for all of them."""
        if asked.patient:
            self._await_in_turn(asked)
            return
        with self._turn:
            self._hurried += 1
            if self._reading and self._patient:
                os.eventfd_write(self._wake, 1)
        try:
            self._await_in_turn(asked)
        finally:
            with self._turn:
                self._hurried -= 1
                self._answered.notify_all()

    def _await_in_turn(self, asked: Asked) -> None:
        late, deadline = False, asked.deadline
        while True:
            with self._turn:
                while asked.reply is None and self._must_wait(asked) and not self._over:
                    if not self._answered.wait(deadline - time.monotonic()):
                        break
                if asked.reply is not None or self._over:
                    return
                if (late or self._must_wait(asked)) and time.monotonic() >= deadline:
                    raise NoAnswer(
                        f"{asked.operation}: the daemon at {self.path} gave no answer within {asked.timeout:g} s"
                    )
                if self._must_wait(asked):
                    continue
                self._reading, self._patient = True, asked.patient
            try:
                late = not _ready(self._interruptible if asked.patient else self._readable, deadline)
                if not late:
                    self._receive()
            finally:
                with self._turn:
                    self._reading = False
                    if asked.patient:
                        self._rest()
                    self._deliver()
                    self._answered.notify_all()
                    if self._over:
                        self._release()

    def _rest(self) -> None:
        """Takes the call to make way, if there was one."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _must_wait(self, asked: Asked) -> bool:
        """Another thread reads, or one that is in more of a hurry is about to."""
        return self._reading or (asked.patient and self._hurried > 0)

    def _writable(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        return _ready(poll, deadline)

    def _receive(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES, _CLOSED_BY_EXEC)
            fds = descriptors_in(ancillary) if ancillary else []
            if flags & _TRUNCATED:
                raise ProtocolError("descriptors were lost: too many on one message")
            if data:
                self._inbox += self._decoder.feed(data, fds)
            else:
                self._end(DaemonUnavailable(f"the daemon at {self.path} went away"))
        except ProtocolError as error:  # before OSError, which it is too
            self._end(error)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(DaemonUnavailable(f"the daemon at {self.path} went away: {error.strerror}"))

    def _deliver(self) -> None:
        for message, fds in self._inbox:
            self.dropped.update(message.get("drop", ()))
            asked = self._pending.get(message.get("id", -1))
            if "bye" in message:
                self._end(_refusal(message, self.path))
            elif asked is not None:
                asked.reply, asked.fds = message, fds
            else:  # the answer to a request that was given up
                close_descriptors(fds)
        self._inbox.clear()

    def _end(self, error: AwexdError) -> None:
        if self._over is None:
            self._over = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def _release(self) -> None:
        self._sock.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        self._decoder.close()
        for _, fds in self._inbox:
            close_descriptors(fds)
        self._inbox.clear()

    def _forked(self) -> None:
        """In a forked child: the session is the parent's."""
        self._turn, self._sending = threading.RLock(), threading.Lock()
        self._answered = threading.Condition(self._turn)
        self._over = DaemonUnavailable("this client belongs to the parent process; make a new one after fork")
        self._pending.clear()
        self._sock.close()
        os.close(self._wake)
        self._wake = -1


def _ready(poll: select.poll, deadline: float) -> bool:
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _connect(path: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
        sock.setblocking(False)
    except PermissionError as error:
        sock.close()
        raise AccessDenied(f"the daemon's socket {path} may not be opened by this user") from error
    except OSError as error:
        sock.close()
        raise DaemonUnavailable(
            f"no daemon answers at {path}: {error.strerror or error}; is `awexd serve` running?"
        ) from error
    return sock


def _result(reply: Message) -> Message:
    error = reply.get("error")
    if isinstance(error, dict):
        raise from_wire(str(error.get("code")), str(error.get("message")), error.get("details") or {})
    result = reply.get("ok")
    if not isinstance(result, dict):
        raise ProtocolError("an answer with neither a result nor an error")
    return result


def _refusal(message: Message, path: str) -> AwexdError:
    body = message["bye"]
    reason = f"the daemon at {path} ended the connection: {body.get('reason')}"
    code = body.get("code")
    return from_wire(code, reason, {}) if isinstance(code, str) else DaemonUnavailable(reason)


def _after_fork() -> None:
    for connection in list(_connections):
        connection._forked()


os.register_at_fork(after_in_child=_after_fork)
