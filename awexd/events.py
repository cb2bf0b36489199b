"""What happened to jobs, in order: for ``awexctl events``, and for whoever follows it. The log has the same lines."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 4096
"""Events that are remembered; what is older is only in the log."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        number: counts from 1 in each start of the daemon.
        at: seconds since 1970, for people.
        kind: ``epoch``, ``joined``, ``left``, ``committed``, ``withdrawn``, ``failed``, ``expired``, ``closed``,
            ``fetching``, ``fetched``, ``metaserver``, ``route`` or ``refused``.
        job: "" where it is of none.
        text: a sentence without the job's name.
    """

    number: int
    at: float
    kind: str
    job: str
    text: str


class Events:
    """The last few thousand events."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)
        self.last = 0

    def add(self, kind: str, job: str, text: str, level: int = logging.INFO) -> None:
        self.last += 1
        self._events.append(Event(self.last, time.time(), kind, job, text))
        _log.log(level, "%s%s", f"job {job}: " if job else "", text)

    def after(self, number: int) -> list[dict[str, Any]]:
        """What is newer than that event, oldest first, as far as it is remembered."""
        newer: list[dict[str, Any]] = []
        for event in reversed(self._events):
            if event.number <= number:
                break
            newer.append(asdict(event))
        return newer[::-1]
