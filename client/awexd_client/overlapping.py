"""Copying a version into live tensors while the rest of it still arrives on this node, for an update that waits for it.

What is copied so counts only once the version is committed here, has been leased to this worker as for any update, and
the daemon says that this very arrival brought it: else everything is copied again. Until then the tensors are dirty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from awexd_client.endpoint import Deadline, told
from awexd_client.preparing import Preparing
from awexd_client.session import Asked
from awexd_client.tables import Prepared, run_all
from awexd_client.updates import State
from awexd_client.waves import Here, Wave
from awexd_transports.errors import DaemonUnavailable, VersionConflict

TOLD = "_awexd_told"
"""Set on an error that the daemon knows. To keep the error instead would keep what its frames hold."""


@dataclass(slots=True)
class Taken:
    """What has been copied of an arrival.

    Attributes:
        left: numbers of the waves that have not.
        began: when the first byte was touched (``time.monotonic()``); None: none was.
        resolved: the request for the update's version, once all is on this node. ``asked``: when that was made.
    """

    arrival: int
    prepared: Prepared
    waves: Sequence[Wave]
    left: set[int] = field(default_factory=set)
    began: float | None = None
    resolved: Asked | None = None
    asked: float = 0.0

    def ready(self, here: Here | None) -> list[int]:
        """Waves that are to be copied and can be: all of them, where nothing is missing."""
        return [number for number in sorted(self.left) if here is None or self.waves[number].ready(here)]


class Overlapping(Preparing):
    """The part of a reader that takes in what is on its way."""

    _state: State
    _version: tuple[int, int] | None
    _leased: str | None

    def _take_in(self, step: int | None, deadline: Deadline) -> Taken | None:
        """Copies what the next update to that step waits for, as it comes: all of it.

        None: nothing is on its way that it would wait for, or what was copied is good for nothing.

        Raises:
            IntegrityError: a byte is not what its writer wrote.
            DeadlineExceeded: names what was waited for.
        """
        answer = self._ask("read.arriving", deadline.left(), step=step, arrival=None, landed=0)
        number = answer["arrival"]
        if number is None:
            return None
        taken: Taken | None = None
        try:
            taken = self._taken(answer, deadline)
            whole = taken is not None and self._follow(taken, step, answer, deadline)
            good = self._ask("read.arrived", deadline.left(), arrival=number)["good"]
        except BaseException as error:
            if not isinstance(error, DaemonUnavailable):
                self._take_back(taken)
                self._tell("read.arrived", arrival=number)
                self._give_up(error)
            raise
        if whole and good:
            return taken
        self._take_back(taken)
        return None

    def _take_back(self, taken: Taken | None) -> None:
        """What was asked for is not used."""
        answer = self._connection.take(taken.resolved) if taken is not None and taken.resolved is not None else None
        if answer is not None:
            self._release(answer["lease"])

    def _give_up(self, error: BaseException) -> None:
        """Tells the daemon that what was copied came to nothing, if anything was."""
        if self._state == "dirty" and not isinstance(error, DaemonUnavailable):
            self._release(None, dirty=True, error=error)

    def _release(self, lease: str | None, *, dirty: bool = False, error: BaseException | None = None) -> None:
        if lease == self._leased:
            self._leased = None
        if error is not None:
            setattr(error, TOLD, True)
        self._tell("read.release", lease=lease, dirty=dirty, error=told(error))

    def _taken(self, answer: dict[str, Any], deadline: Deadline) -> Taken | None:
        """None where what is read cannot be compared before all of it is there: one tensor published with two names."""
        with self._in_use:
            prepared = self._planned(answer["set"], answer["segments"], False, deadline)
            if prepared.live.same.nbytes:
                return None
            waves = self._waves_of(prepared, answer["set"], answer["segments"], answer["pieces"], deadline)
        return Taken(answer["arrival"], prepared, waves, set(range(len(waves))))

    def _follow(self, taken: Taken, step: int | None, answer: dict[str, Any], deadline: Deadline) -> bool:
        """Whether all of it has come, and is copied."""
        here, known = Here(), 0
        while answer["arrival"] == taken.arrival:
            for landed in answer["landed"]:
                here.add(*landed)
            known += len(answer["landed"])
            if answer["over"]:
                # Engines on several nodes agree on it meanwhile. It is held for this worker until ``read.arrived``.
                taken.asked = time.monotonic()
                asked = self._resolving(step, deadline)
                taken.resolved = self._connection.ask("read.resolve", asked, timeout=deadline.left())
                return self._copy(taken, None)
            more = {"step": None, "arrival": taken.arrival, "landed": known}
            answer = self._copy_meanwhile(taken, here, more, deadline)
        return False

    def _copy_meanwhile(self, taken: Taken, here: Here, more: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Copies the waves that are there, while the daemon is asked for more; its answer."""
        asked = self._connection.ask("read.arriving", more, timeout=deadline.left())
        try:
            usable = self._copy(taken, here)
        except BaseException:
            self._connection.take(asked)
            raise
        answer: dict[str, Any] = self._connection.answer(asked)[0]
        self._unmap_dropped("read.arriving")
        return answer if usable else answer | {"arrival": None}

    def _copy(self, taken: Taken, here: Here | None) -> bool:
        """Copies what can be; False: what it is read from was unmapped."""
        with self._in_use:
            self._check_usable()
            if any(mapping.closed for mapping in taken.prepared.mappings):
                return False
            ready = taken.ready(here)
            if ready and self._holding.watch.changed():
                raise self._rebound()
            if ready:
                taken.began = taken.began or time.monotonic()
                self._state, self._version = "dirty", None
                run_all([taken.waves[number].tables for number in ready], sharing=self.world_size)
                taken.left.difference_update(ready)
        return True

    def _resolving(self, step: int | None, deadline: Deadline, *, stage: bool = False) -> dict[str, Any]:
        """What ``read.resolve`` is asked with."""
        return {"step": step, "lease_ms": int(max(deadline.seconds, 1.0) * 1000), "stage": stage}

    def _rebound(self) -> VersionConflict:
        return VersionConflict(f"{self.job}: tensors were rebound or moved since this was staged; update again")
