"""What an exchange needs of the group that it runs in, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from awexd_transports.errors import AwexdError

if TYPE_CHECKING:
    import torch

Wait = Callable[[], object]
"""Returns once a send or a receive is done, or raises ``Lost``."""


class Lost(AwexdError):
    """A member of the group has gone, or does not answer, or the group was aborted: it cannot be used any more."""


class Group(Protocol):
    """Connected processes, by number. One thread at a time sends or receives; any thread may abort."""

    def bind(self) -> str:
        """Listens for the other members; what they connect to, which each is told before ``connect``."""
        ...

    def connect(self, addresses: Sequence[str], seconds: float) -> None:
        """Connects to all others, which do the same. ``addresses``: of each member, by number; all are listening.

        Raises:
            Lost: not all came, or ``abort`` was called meanwhile.
        """
        ...

    def send(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        """Begins to send these bytes, which are to stay as they are until the wait is over.

        Args:
            after: what filling them has given (``rings``).
        """
        ...

    def receive(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        """Begins to receive so many bytes; ``after``: what emptying the memory before has given."""
        ...

    def abort(self) -> None:
        """Frees whoever waits in this group, here and at once; never raises. The group cannot be used any more."""
        ...

    def close(self) -> None:
        """Lets go of connections and memory. Nothing is under way."""
        ...


class Guard:
    """Between whoever moves bytes and whoever gives up: after ``stop`` nothing is touched any more."""

    def __init__(self, first: Callable[[], object] = bool) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._first: Callable[[], object] | None = first

    @property
    def touched(self) -> bool:
        return self._first is None

    @property
    def stopped(self) -> bool:
        return self._stopped

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Around whatever writes to memory that is not the exchange's own. The first time calls ``first`` before.

        Raises:
            Lost: it was stopped.
        """
        with self._lock:
            self.check()
            first, self._first = self._first, None
            if first is not None:
                first()
            yield

    def check(self) -> None:
        if self._stopped:
            raise Lost("this exchange was given up")

    def stop(self) -> None:
        """Returns once nobody is at it, and nobody will be."""
        self._stopped = True
        with self._lock:
            pass
