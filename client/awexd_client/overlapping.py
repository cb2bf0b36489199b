"""Copying a version into live tensors while the rest of it still arrives on this node, for an update that waits for it.

What is copied so counts only once the version is committed here, has been leased to this worker as for any update, and
the daemon says that this very arrival brought it: else everything is copied again. Until then the tensors are dirty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from awexd_client.endpoint import Deadline
from awexd_client.preparing import Preparing
from awexd_client.session import Asked
from awexd_client.tables import Prepared
from awexd_client.updates import State
from awexd_client.waves import Here, Wave
from awexd_transports.errors import DaemonUnavailable, VersionConflict


@dataclass(slots=True)
class Taken:
    """What has been copied of an arrival.

    Attributes:
        left: numbers of the waves that have not.
        began: when the first byte was touched (``time.monotonic()``); None: none was.
    """

    arrival: int
    prepared: Prepared
    waves: Sequence[Wave]
    left: set[int] = field(default_factory=set)
    began: float | None = None

    def finish(self, *, sharing: int) -> None:
        """Copies the rest. Raises as ``Tables.run``."""
        for number in sorted(self.left):
            self.waves[number].tables.run(sharing=sharing)


class Overlapping(Preparing):
    """The part of a reader that takes in what is on its way."""

    _state: State
    _version: tuple[int, int] | None

    def _take_in(self, step: int | None, deadline: Deadline) -> Taken | None:
        """Copies what the next update to that step waits for, as it comes, until all of it is on this node.

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
            whole = taken is not None and self._follow(taken, answer, deadline)
            good = self._ask("read.arrived", deadline.left(), arrival=number)["good"]
        except BaseException as error:
            if not isinstance(error, DaemonUnavailable):
                self._tell("read.arrived", arrival=number)
                self._give_up(error)
            raise
        return taken if whole and good else None

    def _give_up(self, error: BaseException) -> None:
        """Tells the daemon that what was copied came to nothing, if anything was."""
        raise NotImplementedError

    def _taken(self, answer: dict[str, Any], deadline: Deadline) -> Taken | None:
        """None where what is read cannot be compared before all of it is there: one tensor published with two names."""
        with self._in_use:
            prepared = self._planned(answer["set"], answer["segments"], False, deadline)
            if prepared.live.same.nbytes:
                return None
            waves = self._waves_of(prepared, answer["set"], answer["segments"], deadline)
        return Taken(answer["arrival"], prepared, waves, set(range(len(waves))))

    def _follow(self, taken: Taken, answer: dict[str, Any], deadline: Deadline) -> bool:
        """Whether all of it has come. What came last, with its end, is left for the update."""
        here, known = Here(), 0
        while answer["arrival"] == taken.arrival:
            for landed in answer["landed"]:
                here.add(*landed)
            known += len(answer["landed"])
            if answer["over"]:
                return True
            more = {"step": None, "arrival": taken.arrival, "landed": known}
            asked = self._connection.ask("read.arriving", more, timeout=deadline.left())
            answer = self._copy_meanwhile(taken, here, asked)
        return False

    def _copy_meanwhile(self, taken: Taken, here: Here, asked: Asked) -> dict[str, Any]:
        """Copies the waves that are there, while the daemon is asked for more; its answer."""
        try:
            with self._in_use:
                self._check_usable()
                closed = any(mapping.closed for mapping in taken.prepared.mappings)
                ready = [] if closed else [at for at in sorted(taken.left) if taken.waves[at].ready(here)]
                if ready and self._holding.watch.changed():
                    raise self._rebound()
                for number in ready:
                    if taken.began is None:
                        taken.began = time.monotonic()
                    self._state, self._version = "dirty", None
                    taken.waves[number].tables.run(sharing=self.world_size)
                    taken.left.discard(number)
        except BaseException:
            self._connection.take(asked)
            raise
        answer: dict[str, Any] = self._connection.answer(asked)[0]
        self._unmap_dropped("read.arriving")
        return answer | {"arrival": None} if closed else answer

    def _rebound(self) -> VersionConflict:
        return VersionConflict(f"{self.job}: tensors were rebound or moved since this was staged; update again")
