"""``offload``: the registered weights' memory given up, what a held version has without another copy."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, bury
from awexd_client.holding import Holding
from awexd_client.mappings import Mapping, Mappings
from awexd_client.parked import RESERVED, Parked
from awexd_client.publication import Publication
from awexd_client.registered import by_entry, check_covered, made_of, names_of, storage_of, stored_under
from awexd_client.storages import Stored, allocate, check_releasable, release
from awexd_client.unchanged import Source
from awexd_transports.errors import (
    AwexdError,
    DaemonUnavailable,
    EpochChanged,
    InvalidArgument,
    VersionConflict,
    VersionUnavailable,
)

PARCEL = f"{RESERVED}offload"
_log = logging.getLogger(__name__)


@dataclass
class _Offloaded:
    """What ``offload`` has let go.

    Attributes:
        version: the pinned one, None where all is parked.
        numbers: entries that it brings back, into ``stored``.
        parked: whether there is a parcel besides.
    """

    holding: Holding
    version: tuple[int, int] | None
    numbers: list[int]
    stored: list[Stored]
    parked: bool


class Offloading(Parked):
    """A writer whose weights can be let go and had back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._offloaded: _Offloaded | None = None
        self._last: Publication | None = None
        """The last publication, if it was of the registered tensors themselves."""
        self._pinned_maps = Mappings(writable=False)
        self._unpinned = False
        """That the daemon still is to be told that nothing is offloaded any more."""
        super().__init__(*args, **kwargs)

    def offload(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Gives the memory of the registered tensors back until ``restore()``; they keep their identity.

        What was last published from exactly these tensors, in their own dtype, is not copied: that version is pinned
        (never retired or reused) once it has committed. They must not have been changed since; with
        ``verify="checksum"`` they are compared with it first, and parked where they have. All else is parked: what is
        cast, and storages that have more than what is registered. Meanwhile nothing can be published or registered.

        Args:
            timeout: seconds for the daemon, and for other ranks to commit the last step; copying is not interrupted.

        Raises:
            InvalidArgument: offloaded already, or memory that cannot be let go: see ``park``; nothing was touched.
            VersionConflict: an earlier process of this rank has offloaded what was never restored, nor discarded.
            BudgetExceeded: no room for what is to be parked. After any error the tensors are as they were.
        """
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._check_usable()
            self._check_present()
            holding = self._current()
            stored = stored_under(holding)
            check_releasable(stored)
            self._take_back(deadline)
            source = self._pin_last(deadline)
            try:
                numbers, free = self._restorable(holding, stored, source)
                rest = [one for one in stored if one not in free]
                if source is not None and not free:
                    self._unpin(deadline)
                    source = None
                if rest:
                    self._park(PARCEL, by_entry(holding, rest), deadline)
            except BaseException:
                if source is not None:
                    self._unpin_later()
                raise
            self._forget_copies()
            release(free)
            key = source.key if source else None
            self._offloaded = _Offloaded(holding, key, numbers, free, bool(rest))

    def restore(
        self,
        name: str | None = None,
        tensors: object = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        keep: bool = True,
    ) -> None:
        """Brings back, bit for bit, what ``park`` put aside under that name; without a name, what ``offload`` did.

        A restarted rank (same job, rank and user) takes what its former process has put aside: with ``tensors`` of the
        same names, shapes and dtypes, which are filled; or, without a name, into what it has registered.

        Args:
            tensors: only for what another process has parked: {name: tensor}, or a list.
            timeout: seconds for the daemon; copying is not interrupted.
            keep: the daemon keeps the host memory for the next parcel of that name, already mapped and faulted in (the
                first takes many times as long as the later ones), until this session ends or another needs it.
                False: it is given back at once.

        Raises:
            InvalidArgument: nothing was put aside.
            VersionUnavailable: nothing was put aside by an earlier process either.
            ManifestMismatch: ``tensors`` are not of what was parked.
            BudgetExceeded: no room on the device. It stays put aside, as after any error, and may be tried again.
            IntegrityError: the bytes are not those that were put aside.
        """
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._check_usable()
            if name is not None:
                if name.startswith(RESERVED):
                    raise InvalidArgument(f"{name!r}: what offload() let go comes back by restore()")
                self._restore_parked(name, tensors, deadline, keep=keep)
            elif self._offloaded is not None:
                self._restore_own(self._offloaded, deadline, keep=keep)
            else:
                self._restore_earlier(deadline)

    def discard(self, name: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """As ``Parked.discard``; without a name, what ``offload`` has put aside, which needs a registered writer."""
        if name is not None:
            super().discard(name, timeout)
            return
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._unpin(deadline)
            super().discard(PARCEL, deadline.left())
            self._offloaded = None

    # what a writer has besides

    @abstractmethod
    def _current(self) -> Holding:
        """What is registered, where it lies now."""

    def _check_present(self) -> None:
        """Raises InvalidArgument while the registered tensors have no memory."""
        if self._offloaded is not None:
            raise InvalidArgument(f"{self.job}: this writer's tensors are offloaded; restore() comes first")

    def _forget_offloaded(self) -> None:
        """The job has ended, and all that it held."""
        self._offloaded, self._last = None, None
        self._parcels.clear()

    # internals

    def _pin_last(self, deadline: Deadline) -> Source | None:
        """The last published version, pinned; None where there is none to be had."""
        last = self._last
        if last is not None:
            try:
                last.committed(deadline.left())
            except (VersionConflict, EpochChanged) as error:
                _log.info("%s: step %d holds nothing to offload into: %s", self.job, last.step, error)
                last = None
        try:
            answer = self._pin([last.epoch, last.step] if last else None, deadline)
        except VersionUnavailable:
            return None
        if last is None:
            raise VersionConflict(
                f"{self.job}: an earlier process of rank {self.rank} has offloaded into step {answer['version'][1]}: "
                "restore() or discard() first"
            )
        try:
            return self._source(answer, deadline)
        except BaseException:
            self._unpin_later()
            raise

    def _pin(self, version: list[int] | None, deadline: Deadline) -> dict[str, Any]:
        return self._surviving(lambda deadline: self._ask("park.pin", deadline.left(), version=version), deadline)

    def _unpin(self, deadline: Deadline) -> None:
        self._surviving(lambda deadline: self._ask("park.unpin", deadline.left()), deadline)

    def _unpin_later(self) -> None:
        """Where an error is on its way: at once if the daemon is there, else with the next connection."""
        try:
            self._unpin(Deadline(1.0))
        except AwexdError:
            self._unpinned = True

    def _resume(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        if self._unpinned:
            self._ask("park.unpin", deadline.left())
            self._unpinned = False
        super()._resume(deadline.left())

    def _source(self, answer: dict[str, Any], deadline: Deadline) -> Source:
        found = self._surviving(
            lambda deadline: self._ask_for_manifests("read.sources", deadline.left(), job=self.job, set=answer["set"]),
            deadline,
        )
        if found["set"] is None:
            raise VersionUnavailable(f"{self.job}: what this version's bytes mean is not known any more")
        manifests = tuple(self._manifests[digest] for digest in found["ranks"])
        self._manifests.clear()
        segments = self._surviving(lambda deadline: self._pinned_segments(answer["segments"], deadline), deadline)
        stored = frozenset(rank for rank, (_, _, summed) in enumerate(answer["segments"]) if summed)
        epoch, step = answer["version"]
        return Source((epoch, step), manifests, dict(enumerate(segments)), stored)

    def _pinned_segments(self, wanted: Sequence[tuple[str, int, bool]], deadline: Deadline) -> list[Mapping]:
        """Those that this writer has mapped anyway, registered with CUDA perhaps, are not mapped twice."""
        own = {segment: mapping for segment, _, _ in wanted if (mapping := self._maps.known(segment)) is not None}
        others = [(segment, nbytes) for segment, nbytes, _ in wanted if segment not in own]
        mapped = self._pinned_maps.get(others, lambda ids: self._open_segments(ids, deadline))
        found = {segment: mapping for (segment, _), mapping in zip(others, mapped, strict=True)} | own
        return [found[segment] for segment, _, _ in wanted]

    def _restorable(
        self, holding: Holding, stored: Sequence[Stored], source: Source | None
    ) -> tuple[list[int], list[Stored]]:
        """Entries that the version brings back, and the storages that are wholly made of them."""
        if source is None:
            return [], []
        of = storage_of(holding, stored)
        numbers = source.restores(holding)
        free = [one for one in stored if one.nbytes and made_of(one, holding, numbers, of)]
        numbers = [number for number in numbers if of[number] in free]
        if numbers and self.verify_mode == "checksum":
            changed = {id(of[number]) for number in source.changed(holding, numbers)}
            if changed:
                _log.warning(
                    "%s: %d storages were changed since %s was published; they are parked",
                    self.job,
                    len(changed),
                    f"step {source.key[1]}",
                )
            free = [one for one in free if id(one) not in changed]
            numbers = [number for number in numbers if id(of[number]) not in changed]
        return numbers, free

    def _restore_own(self, offloaded: _Offloaded, deadline: Deadline, *, keep: bool) -> None:
        check = self.verify_mode == "checksum"
        source = None
        if offloaded.version is not None:
            source = self._source(self._pin(None, deadline), deadline)
            if source.key != offloaded.version:
                raise VersionUnavailable(
                    f"{self.job}: step {offloaded.version[1]} is pinned no more; its job was closed"
                )
        self._forget_copies()
        allocate(offloaded.stored)
        try:
            if source is not None:
                source.copies(offloaded.holding, offloaded.numbers, check=check).run(sharing=self.world_size)
            if offloaded.parked:
                self._restore_parked(PARCEL, None, deadline, keep=keep)
                offloaded.parked = False
        except BaseException:
            release(offloaded.stored)
            raise
        self._offloaded = None
        self._end_pin(source, deadline)

    def _restore_earlier(self, deadline: Deadline) -> None:
        """What an earlier process of this rank has offloaded, into what is registered now."""
        holding, check = self._current(), self.verify_mode == "checksum"
        parcel = source = None
        with contextlib.suppress(VersionUnavailable):
            parcel = self._earlier(PARCEL, deadline)
        with contextlib.suppress(VersionUnavailable):
            source = self._source(self._pin(None, deadline), deadline)
        if parcel is None and source is None:
            raise InvalidArgument(
                f"{self.job}: nothing is offloaded, by this process or an earlier one of rank {self.rank}"
            )
        parked = parcel.contents.tensors if parcel else {}
        names = names_of(holding)
        rest = [number for number in (source.restores(holding) if source else ()) if names[number] not in parked]
        check_covered(holding, [*rest, *(number for number, name in enumerate(names) if name in parked)])
        copies = source.copies(holding, rest, check=check) if source else None
        if parcel is not None:
            ours = {names[number]: shard.tensor for number, shard in enumerate(holding.weights.direct)}
            parcel.fill({name: ours[name] for name in parked if name in ours}, self.world_size, check=check)
        if copies is not None:
            copies.run(sharing=self.world_size)
        if parcel is not None:
            self._end(parcel, keep=False, deadline=deadline)
        self._end_pin(source, deadline)

    def _end_pin(self, source: Source | None, deadline: Deadline) -> None:
        if source is None:
            return
        try:
            self._unpin(deadline)
        except DaemonUnavailable:
            self._unpinned = True
            _log.warning("%s: the daemon still pins step %d, which was restored", self.job, source.key[1])

    def _forget_parcels(self, segments: Sequence[str]) -> None:
        super()._forget_parcels(segments)
        self._pinned_maps.discard(segments)

    def _close_maps(self) -> None:
        super()._close_maps()
        self._pinned_maps.close()

    def _after_fork(self) -> None:
        super()._after_fork()
        bury(self._pinned_maps)
        self._pinned_maps = Mappings(writable=False)
