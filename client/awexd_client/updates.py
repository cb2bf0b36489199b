"""An update on its way into live tensors, and what it did."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from awexd_client.adapters.base import EngineWeights
from awexd_client.tables import Prepared
from awexd_transports.errors import AwexdError

State = Literal["empty", "ready", "dirty"]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did.

    Attributes:
        epoch, step: the version that the live tensors now hold.
        bytes: written into them.
        stage_seconds: spent before the first of them was touched (the wait for the version included).
        pause_seconds: from then until the version was known to be good; the engine must not generate meanwhile.
        transport: how the bytes came: ``"shm"`` or ``"cuda_ipc"``.
        mode: ``"host"``, or ``"direct"``: out of the trainer's own memory.
        reason: why its writer chose that.
        workers: one result a worker, where a WeightReader made this one.
    """

    epoch: int
    step: int
    bytes: int
    stage_seconds: float
    pause_seconds: float
    transport: str
    mode: str = "host"
    reason: str = ""
    workers: tuple[UpdateResult, ...] = ()


@dataclass(slots=True)
class Staged:
    """A version leased and checked, nothing touched yet.

    Attributes:
        lease: its id. ``until``: it lasts at least so long (``time.monotonic()``).
        updates: this worker's count of updates, once this one is done.
        lent: its bytes are the trainer's live parameters. ``reason``: why, or why not.
    """

    epoch: int
    step: int
    lease: str
    until: float
    updates: int
    prepared: Prepared
    started: float
    ready: float
    lent: bool = False
    reason: str = ""

    @property
    def good(self) -> bool:
        """The lease has not run out and the version was not withdrawn, for all that can be told without asking.

        A rollback wipes the headers before it is answered; the memory is not reused while the lease lasts.
        """
        mappings = self.prepared.mappings
        named = bool(mappings) and all(mapping.sealed for mapping in mappings)
        return named and time.monotonic() < self.until


def load_of_engine(weights: EngineWeights) -> None:
    """Has the engine load what it loads itself.

    Raises:
        AwexdError: it could not; the cause is chained.
    """
    if weights.load is None:
        return
    try:
        weights.load()
    except AwexdError:
        raise
    except Exception as error:  # the engine's own: of any kind
        raise AwexdError(f"the engine could not load the new weights: {type(error).__name__}: {error}") from error
