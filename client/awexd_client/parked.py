"""``park`` and what brings it back: tensors' memory given up for a while, their bytes held by the daemon."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, bury
from awexd_client.mappings import Mappings
from awexd_client.parcels import Contents, Parcel
from awexd_client.phases import Phased
from awexd_client.storages import Stored, check_releasable, named, storages_of
from awexd_transports.errors import AwexdError, DaemonUnavailable, InvalidArgument, VersionConflict
from awexd_transports.segment import HEADER_BYTES

if TYPE_CHECKING:
    import torch

RESERVED = "awexd."
"""How names begin that only this package uses."""
_RETRIES = 5
_log = logging.getLogger(__name__)


class Parked(Phased):
    """An endpoint that parks tensors. Its mappings of parcels outlive a connection: they may have the only copy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._parcel_maps = Mappings(writable=True)
        self._parcels: dict[str, Parcel] = {}
        self._spares: dict[str, tuple[str, int]] = {}
        """Memory that the daemon keeps for the next parcel of a name: its segment, and bytes with the header."""
        self._undropped: dict[str, str] = {}
        """Parcels that were restored while no daemon was there to be told."""
        super().__init__(*args, **kwargs)

    def park(self, name: str, tensors: object, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Copies tensors into host memory that the daemon holds, and gives their own memory back, until ``restore``.

        Whole storages are moved, once each, with all views and aliases of them; nothing may use any of them meanwhile
        (nor a graph of autograd that saved one). What is parked belongs to the job: it survives this process and the
        daemon, and never expires. Of memory, what has not left yet is taken, and in the host all of it once more.

        Args:
            name: a word; one parcel of a name for each rank.
            tensors: {name: tensor}, or a list.
            timeout: seconds for the daemon; copying is not interrupted.

        Raises:
            InvalidArgument: memory that is not torch's own, a view of a storage whose other bytes were not given, or
                memory that was let go already: by name, before anything is touched.
            VersionConflict: there is a parcel of that name.
            BudgetExceeded: no room in the host. After any error the tensors are as they were.
        """
        if name.startswith(RESERVED):
            raise InvalidArgument(f"{name!r}: names that begin with {RESERVED!r} are awexd's own")
        stored = storages_of(named(tensors))
        check_releasable(stored)
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._check_usable()
            if name in self._parcels:
                raise VersionConflict(f"{self.job}: {name!r} is parked already; restore it first")
            self._take_back(deadline)
            self._park(name, stored, deadline)

    def discard(self, name: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Ends what this rank has parked under that name, also by an earlier process, without bringing it back."""
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._drop(name, None, keep=False, deadline=deadline)
            self._parcels.pop(name, None)

    def _restore_parked(self, name: str, tensors: object, deadline: Deadline, *, keep: bool) -> None:
        parcel = self._parcels.get(name)
        given = None if tensors is None else named(tensors)
        check = self.verify_mode == "checksum"
        if parcel is not None:
            if given is not None:
                _check_own(parcel, given)
            self._forget_copies()
            parcel.give(self.world_size, check=check)
        elif given is None:
            raise InvalidArgument(
                f"{self.job}: this process has parked nothing as {name!r}; to take back what an earlier one has, "
                "give tensors of the same names, shapes and dtypes"
            )
        else:
            parcel = self._earlier(name, deadline)
            parcel.fill(given, self.world_size, check=check)
        self._end(parcel, keep=keep, deadline=deadline)

    def _park(self, name: str, stored: Sequence[Stored], deadline: Deadline) -> None:
        contents = Contents.of(stored, self.verify_mode == "checksum")
        self._forget_copies()
        for _ in range(_RETRIES):
            if self._park_once(name, stored, contents, deadline):
                return
        raise DaemonUnavailable(
            f"what was being parked as {name!r} was lost {_RETRIES} times to restarts of the daemon"
        )

    def _park_once(self, name: str, stored: Sequence[Stored], contents: Contents, deadline: Deadline) -> bool:
        """False: it was lost with its daemon, and the tensors are as they were."""
        nbytes = HEADER_BYTES + contents.nbytes
        spare, size = self._spares.pop(name, ("", 0))
        if size != nbytes:
            self._parcel_maps.discard([spare])  # before other memory is asked for
        begin = {**self._parcel_of(name), "nbytes": contents.nbytes}
        segment = self._surviving(lambda deadline: self._ask("park.begin", deadline.left(), **begin), deadline)[
            "segment"
        ]
        if spare != segment:
            self._parcel_maps.discard([spare])
        seal = {**self._parcel_of(name), "segment": segment}
        parcel = None
        try:
            (mapping,) = self._parcel_maps.get([(segment, nbytes)], lambda _: self._open_parcel(name, deadline)[1])
            parcel = self._parcels[name] = Parcel(name, segment, mapping, contents, stored)
            parcel.take(self.world_size)
            self._surviving(lambda deadline: self._ask("park.seal", deadline.left(), **seal), deadline)
        except BaseException as error:
            if parcel is not None:
                self._put_back(parcel, error)
            self._parcel_maps.discard([segment])
            if isinstance(error, DaemonUnavailable):
                self._undropped[name] = segment  # whether it is pinned is not known
            else:
                self._tell("park.drop", **seal, keep=False)
            lost = isinstance(error, VersionConflict) and error.details.get("retry")
            if (lost or isinstance(error, DaemonUnavailable)) and deadline.left() > 0 and not self._closed:
                return False
            raise
        return True

    def _put_back(self, parcel: Parcel, error: BaseException) -> None:
        try:
            parcel.give(self.world_size, check=False)
        except AwexdError as problem:
            error.add_note(f"and its memory cannot be had back now: restore({parcel.name!r}) tries again ({problem})")
            raise error from None
        del self._parcels[parcel.name]

    def _earlier(self, name: str, deadline: Deadline) -> Parcel:
        """What an earlier process has parked.

        Raises:
            VersionUnavailable: nothing of that name.
        """
        answer, fds = self._surviving(lambda deadline: self._open_parcel(name, deadline), deadline)
        segment = answer["segment"]
        self._parcel_maps.discard([segment])  # so that the descriptor is taken
        (mapping,) = self._parcel_maps.get([(segment, answer["nbytes"])], lambda _: fds)
        return Parcel(name, segment, mapping, Contents.read(mapping), ())

    def _open_parcel(self, name: str, deadline: Deadline) -> tuple[dict[str, Any], list[int]]:
        return self._call("park.open", self._parcel_of(name), deadline.left())

    def _parcel_of(self, name: str) -> dict[str, Any]:
        return {"job": self.job, "rank": self.rank, "name": name}

    def _end(self, parcel: Parcel, *, keep: bool, deadline: Deadline) -> None:
        """After its bytes are back: whatever goes wrong now is no failure of that."""
        name, segment = parcel.name, parcel.segment
        self._parcels.pop(name, None)
        try:
            kept = self._drop(name, segment, keep=keep, deadline=deadline)
        except AwexdError as error:
            self._undropped[name], kept = segment, False
            _log.warning("%s: the daemon still holds %r, which was restored: %s", self.job, name, error)
        if kept:
            self._spares[name] = segment, HEADER_BYTES + parcel.contents.nbytes
        else:
            self._parcel_maps.discard([segment])

    def _drop(self, name: str, segment: str | None, *, keep: bool, deadline: Deadline) -> bool:
        """Whether its memory is kept for the next parcel of that name."""
        drop = {**self._parcel_of(name), "segment": segment, "keep": keep}
        answer = self._surviving(lambda deadline: self._ask("park.drop", deadline.left(), **drop), deadline)
        return bool(answer["kept"])

    def _resume(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        self._parcel_maps.discard([segment for segment, _ in self._spares.values()])  # gone with the daemon before
        self._spares.clear()
        for name, segment in list(self._undropped.items()):
            self._ask("park.drop", deadline.left(), **self._parcel_of(name), segment=segment, keep=False)
            del self._undropped[name]
        super()._resume(deadline.left())

    def _forget_parcels(self, segments: Sequence[str]) -> None:
        """The daemon has given these up: with their job, or because somebody asked."""
        gone = set(segments)
        self._spares = {name: spare for name, spare in self._spares.items() if spare[0] not in gone}
        self._parcels = {name: parcel for name, parcel in self._parcels.items() if parcel.segment not in gone}
        self._parcel_maps.discard(segments)

    @abstractmethod
    def _take_back(self, deadline: Deadline) -> None:
        """Memory is about to go: what of it is lent is withdrawn, and readers have closed it.

        Raises:
            DeadlineExceeded: some have not.
        """

    @abstractmethod
    def _forget_copies(self) -> None:
        """Memory is about to move: no copy that was prepared for it holds any more."""

    def _close_maps(self) -> None:
        super()._close_maps()
        self._parcel_maps.close()

    def _after_fork(self) -> None:
        super()._after_fork()
        bury(self._parcel_maps)
        self._parcel_maps = Mappings(writable=True)
        self._parcels, self._spares = {}, {}


def _check_own(parcel: Parcel, tensors: dict[str, torch.Tensor]) -> None:
    own = {one.storage._cdata for one in parcel.stored}
    for name, tensor in tensors.items():
        if tensor.untyped_storage()._cdata not in own:
            raise InvalidArgument(
                f"{name}: not what this process parked as {parcel.name!r}; that comes back into its own tensors"
            )
