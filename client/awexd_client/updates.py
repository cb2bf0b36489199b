"""An update on its way into live tensors, and what it did."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from awexd_client.adapters.base import EngineWeights
from awexd_client.mappings import Segment
from awexd_client.tables import Prepared, Sources
from awexd_transports.cuda.lent import Opened, Words
from awexd_transports.errors import AwexdError, DeadlineExceeded, VersionUnavailable

if TYPE_CHECKING:
    from awexd_client.overlapping import Taken

_LOOK_SECONDS = 2e-5
State = Literal["empty", "ready", "dirty"]


class TakenBack(VersionUnavailable):
    """A lent version's trainer took it back, perhaps to lend it again."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did.

    Attributes:
        epoch, step: the version that the live tensors now hold.
        bytes: written into them.
        stage_seconds: spent before the first of them was touched (the wait for the version included).
        pause_seconds: from then until the version was known to be good; the engine must not generate meanwhile.
        transport: how the bytes came: ``"shm"``, ``"cuda_ipc"`` or ``"nccl"``.
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
        ranks: of the trainer: so many segments the version has.
        exchanged: what its trainer sends, if it does; then nothing is prepared.
        arrival: by which it has come to this node; 0: by none that could be followed.
        taken: what of it was copied meanwhile, if any was.
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
    ranks: int = 0
    exchanged: Sources | None = None
    arrival: int = 0
    taken: Taken | None = None

    @property
    def begun(self) -> float | None:
        """When the first live byte was touched, if that was before this was staged (``time.monotonic()``)."""
        return self.taken.began if self.taken is not None else None

    @property
    def good(self) -> bool:
        """The lease has not run out and the version was not withdrawn, for all that can be told without asking.

        A rollback wipes the headers before it is answered; the memory is not reused while the lease lasts.
        """
        mappings = self.prepared.mappings
        named = bool(mappings) and all(map(self._stands, mappings))
        # Any rank may give a lent version up, also one whose memory is not read here.
        seen = not self.lent or len(mappings) == self.ranks
        return named and seen and time.monotonic() < self.until

    def _stands(self, mapping: Segment) -> bool:
        if isinstance(mapping, Opened):
            return mapping.words.lasts(self.step) and mapping.words.is_so(Words.SETTLED, self.step)
        return mapping.sealed

    @property
    def lasts(self) -> bool:
        """It is not a lent version that its owners have taken back."""
        return all(not isinstance(one, Opened) or one.words.lasts(self.step) for one in self.prepared.mappings)

    def await_owners(self, seconds: float) -> bool:
        """Whether the lent version's owners have all found it where they declared it: only then it may be read.

        False: one has taken it back. They look while readers are being told: it is a matter of milliseconds.

        Raises:
            DeadlineExceeded: one neither did.
        """
        end = time.monotonic() + seconds
        for mapping in self.prepared.mappings:
            while isinstance(mapping, Opened) and not mapping.words.is_so(Words.LOOKED, self.step):
                if not mapping.words.lasts(self.step):
                    return False
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"step {self.step} is lent by a trainer that does not get on with it")
                time.sleep(_LOOK_SECONDS)
        return self.lasts


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
