"""One session's requests: answered at once where they can be, else as soon as what they wait for has changed."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from awexd.channel import Client
from awexd.protocol import MAX_FDS, Message, close_descriptors, error_reply, parse_request
from awexd.service import Call, Outcome, Reply, Service, late
from awexd.store import Wait
from awexd.store.ledger import Session
from awexd_transports.errors import AwexdError, InvalidArgument, ProtocolError

MAX_OPEN_REQUESTS = 256
MAX_DROPS = MAX_FDS
"""Segments to unmap that one reply names: the client gives them back in one request."""

_log = logging.getLogger(__name__)


class Conversation:
    """Takes a session's messages.

    ``greet`` takes the first; ``tasks`` run what has to wait for a disk or a thread; ``close`` ends the rest.
    """

    def __init__(
        self,
        service: Service,
        channel: Client,
        session: Session,
        tasks: asyncio.TaskGroup,
        greet: Callable[[Message], None],
    ) -> None:
        self.service = service
        self.channel = channel
        self.session = session
        self.tasks = tasks
        self.open: set[Request] = set()
        self.said_goodbye = False
        self._greet: Callable[[Message], None] | None = greet

    def take(self, message: Message, fds: list[int]) -> None:
        """Carries out one request as far as it goes now, or has it carried out at its job's home. Owns ``fds``.

        Raises:
            ProtocolError: what ends the connection.
        """
        forward = self.service.forwards.get(self.session.id)
        if forward is not None and forward.takes(message):
            self.said_goodbye = self.said_goodbye or message.get("op") == "goodbye"
            forward.send(message, fds)
            return
        request = None
        try:
            if len(self.open) >= MAX_OPEN_REQUESTS or len(fds) > 1:
                raise ProtocolError(f"over {MAX_OPEN_REQUESTS} requests, or one descriptor on a request")
            request = self._request(message, fds)
        finally:
            if request is None:
                close_descriptors(fds)
        if request is not None:
            request.advance()

    def close(self) -> None:
        """Ends the requests that wait; those in tasks end with their group."""
        for request in [request for request in self.open if request.waits]:
            request.end()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        if self.session.to_drop:
            message["drop"] = sorted(self.session.to_drop)[:MAX_DROPS]
        self.channel.send(message, fds or ())

    def _request(self, message: Message, fds: list[int]) -> Request | None:
        """None: answered already."""
        if self._greet is not None:
            self._greet(message)
            self._greet = None
            return None
        try:
            request_id, operation, arguments, seconds = parse_request(message)
        except InvalidArgument as error:
            named = error.details.get("id")
            if not isinstance(named, int):
                raise
            self.send(error_reply(named, error))
            return None
        if self.said_goodbye:
            raise ProtocolError("a request after goodbye")
        if operation == "goodbye":
            self.said_goodbye = True
            self.channel.send({"id": request_id, "ok": {}})
            return None
        try:
            self.channel.permit(operation, arguments)
        except AwexdError as error:
            self.send(error_reply(request_id, error))
            return None
        now = asyncio.get_running_loop().time()
        call = Call(self.session, self.channel.peer, arguments, fds, now, now + seconds, self.channel.send)
        return Request(self, request_id, operation, call)


class Request:
    """One request, from its message to its answer. Whatever goes wrong in it is its answer, and nothing else."""

    __slots__ = ("_call", "_conversation", "_id", "_operation", "_timer", "_wait")

    def __init__(self, conversation: Conversation, request_id: int, operation: str, call: Call) -> None:
        self._conversation = conversation
        self._id = request_id
        self._operation = operation
        self._call = call
        self._wait: Wait | None = None
        self._timer: asyncio.TimerHandle | None = None
        conversation.open.add(self)

    @property
    def waits(self) -> bool:
        """For a job to change."""
        return self._wait is not None

    def advance(self) -> None:
        """Carries it out as far as it goes now; called again when the job that it waits for has changed."""
        try:
            outcome = self._conversation.service.perform(self._operation, self._call)
        except Exception as error:  # noqa: BLE001 - answered
            self._refuse(error)
        else:
            self._follow(outcome)

    def end(self) -> None:
        """Lets go of all it has; its answer is given, or nobody is there to take it."""
        self._conversation.open.discard(self)
        self._wait_no_more()
        close_descriptors(self._call.fds)
        self._call.fds.clear()

    def _follow(self, outcome: Outcome) -> None:
        if isinstance(outcome, Reply):
            self._answer(outcome)
        elif isinstance(outcome, Wait):
            self._stand_by(outcome)
        else:
            self._wait_no_more()
            task = self._conversation.tasks.create_task(self._run(outcome))
            task.add_done_callback(functools.partial(self._ran, outcome))

    def _stand_by(self, wait: Wait) -> None:
        self._wait = wait
        self._conversation.service.changes.call(wait.job, self.advance)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._call.deadline, self._expire)

    def _wait_no_more(self) -> None:
        if self._wait is not None:
            self._conversation.service.changes.forget(self._wait.job, self.advance)
            self._wait = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._wait is not None:
            self._refuse(late(self._call, self._wait))

    async def _run(self, work: Coroutine[Any, Any, Outcome]) -> None:
        try:
            outcome = await self._conversation.service.finish(work)
        except Exception as error:  # noqa: BLE001 - answered
            self._refuse(error)
        else:
            self._follow(outcome)

    def _ran(self, work: Coroutine[Any, Any, Outcome], task: asyncio.Task[None]) -> None:
        if task.cancelled():
            work.close()  # where the session ended before it had begun
            self.end()

    def _answer(self, reply: Reply) -> None:
        try:
            self._conversation.send({"id": self._id, "ok": reply.result}, reply.fds)
        except Exception as error:  # noqa: BLE001 - too large, say: answered
            self._refuse(error)
        else:
            self.end()

    def _refuse(self, error: Exception) -> None:
        if not isinstance(error, AwexdError):
            _log.error("%s failed for process %d", self._operation, self._call.peer.pid, exc_info=error)
            cause = type(error).__name__
            error = AwexdError(f"{self._operation} failed inside the daemon: {cause}; see its log")
        self._conversation.send(error_reply(self._id, error))
        self.end()
