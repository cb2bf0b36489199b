"""One GPU, one phase: ``with writer.phase("train"): ...`` and ``with reader.phase("rollout"): ...``."""

from __future__ import annotations

import logging
import secrets
from abc import abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from awexd.protocol import MAX_GPUS, PHASES
from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, Endpoint
from awexd_client.holding import Holding
from awexd_client.session import NoAnswer
from awexd_transports.cuda import driver as cuda
from awexd_transports.errors import AwexdError, DaemonUnavailable, InvalidArgument

HOST = "host"
"""In a GPU's place, for tensors in host memory."""
_log = logging.getLogger(__name__)


class Phased(Endpoint):
    """An endpoint that can be in a phase."""

    _phase: Phase | None = None
    _left: tuple[str, ...] = ()
    """Phases that were left while no daemon was there to be told."""

    def phase(self, phase: str, timeout: float = DEFAULT_TIMEOUT, *, gpus: Iterable[str] | None = None) -> Phase:
        """``with client.phase("train"):`` waits until nobody is in the other phase on these GPUs, and keeps it out.

        Several clients may be in the same phase. Who waits for the other one goes before those who come for this one
        later. A process that ends has left. Whoever is inside stays so while the daemon is down or restarts.

        Args:
            phase: ``"train"`` or ``"rollout"``.
            timeout: seconds to wait for it, and again for the daemon when it is left.
            gpus: their UUIDs; None: those that the registered tensors lie on, ``"host"`` for host memory.

        Raises:
            InvalidArgument: no such phase, no tensors registered, or (on entering) this client is in a phase already.
            DeadlineExceeded: on entering: names who is in the other phase, and since when.
        """
        if phase not in PHASES:
            raise InvalidArgument(f"phase {phase!r}; there are {' and '.join(PHASES)}")
        if isinstance(gpus, str):
            raise InvalidArgument(f"gpus must be a list of UUIDs, not {gpus!r}")
        named = self._gpus() if gpus is None else list(gpus)
        if not 0 < len(named) <= MAX_GPUS or not all(named):
            raise InvalidArgument(f"gpus must be 1 to {MAX_GPUS} UUIDs, not {named!r}")
        return Phase(self, phase, named, timeout)

    @property
    @abstractmethod
    def _who(self) -> str:
        """This client as its job calls it: for whoever waits for it."""

    @abstractmethod
    def _registered(self) -> Holding | None: ...

    def _gpus(self) -> list[str]:
        holding = self._registered()
        if holding is None:
            raise InvalidArgument("phase(...) needs to know which GPUs: register(...) first, or name them with gpus=")
        return gpus_of(holding)

    def _enter(self, phase: Phase, deadline: Deadline) -> None:
        self._ask(
            "phase.enter",
            deadline.left(),
            job=self.job,
            who=self._who,
            gpus=phase.gpus,
            phase=phase.name,
            token=phase.token,
        )

    def _leave(self, token: str, timeout: float) -> None:
        asked = Deadline(timeout)
        self._surviving(lambda deadline: self._ask("phase.leave", deadline.left(), token=token), asked)

    def _resume(self, timeout: float) -> None:
        """On a new connection: what was left meanwhile is told, and what this client is in, claimed again."""
        deadline = Deadline(timeout)
        for token in self._left:
            self._ask("phase.leave", deadline.left(), token=token)
        self._left = ()
        if self._phase is not None:
            self._enter(self._phase, deadline)


class Phase:
    """A phase of a client: entered and left by ``with``. Not to be entered twice."""

    def __init__(self, client: Phased, name: str, gpus: list[str], timeout: float) -> None:
        self.name = name
        self.gpus = gpus
        self.token = secrets.token_hex(16)
        self._client = client
        self._timeout = timeout

    def __enter__(self) -> Self:
        client, deadline = self._client, Deadline(self._timeout)
        if client._phase is not None:
            raise InvalidArgument(f"this client is in phase {client._phase.name!r} already; leave it first")
        try:
            client._surviving(lambda deadline: client._enter(self, deadline), deadline)
        except BaseException as error:
            if isinstance(error, DaemonUnavailable | NoAnswer):  # the answer may have been lost
                client._left = (*client._left, self.token)
            elif not isinstance(error, InvalidArgument):
                client._tell("phase.leave", token=self.token)
            raise
        client._phase = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        client = self._client
        if client._phase is not self:
            return
        client._phase = None
        if client._closed or client._forked:
            return  # it left with its session
        try:
            client._leave(self.token, self._timeout)
        except AwexdError as problem:
            client._left = (*client._left, self.token)
            if error is None:
                raise
            _log.warning("phase %s of %s could not be left: %s", self.name, client.job, problem)


def gpus_of(holding: Holding) -> list[str]:
    """The UUIDs of the GPUs that registered tensors lie on; ``HOST`` where none does."""
    found = {device for view in holding.views if (device := cuda.driver.device_of(view)) is not None}
    uuids = cuda.driver.devices() if found else []
    return [uuids[device] for device in sorted(found)] or [HOST]
