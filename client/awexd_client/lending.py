"""A trainer's own GPU memory, lent to the engines on its node: versions whose bytes are its live parameters."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awexd.manifests import lasting_memfd
from awexd.protocol import MAX_DEADLINE_MS, MAX_GPUS
from awexd_client.checksums import OwnSums, table_of
from awexd_client.endpoint import Deadline
from awexd_client.holding import Holding
from awexd_client.outgoing import SegmentLayout
from awexd_client.publication import Publication
from awexd_client.session import Connection, NoAnswer
from awexd_transports.cuda import driver as cuda
from awexd_transports.cuda.lent import Described, Description, NotLendable, Words, describe, size_of, write_description
from awexd_transports.errors import AwexdError, DeadlineExceeded, EpochChanged, InvalidArgument, VersionConflict
from awexd_transports.view import View

if TYPE_CHECKING:
    from awexd_client.writer import WeightWriter

GIVE_SECONDS = 10.0
CHOICE_SECONDS = 15.0
"""How long the first rank of a step waits for others to declare their memory, each in its own first ``publish``."""
MAX_WHY = 1000
CLOSE_SECONDS = 5.0
"""How long the end of a writer waits for readers to close its memory, which it may free then."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lent:
    """A rank's memory as it was declared. Keeps the tensors until no reader has them open.

    Attributes:
        segment: the daemon's id of it.
        views: where each piece of the segment's manifest lies.
        devices: ordinals of the devices that it is on.
        sums: of what lies there; None where they are not wanted, or cannot be taken.
        nbytes: of the views.
        chunks: of virtual memory: the device and address of each, by number.
    """

    segment: str
    holding: Holding
    layout: SegmentLayout
    views: tuple[View, ...]
    devices: tuple[int, ...]
    description: Description
    sums: OwnSums | None
    nbytes: int
    chunks: list[tuple[int, int]]


class Lender:
    """Publishes a writer's versions without copying them, where that can be."""

    def __init__(self, writer: WeightWriter) -> None:
        self._writer = writer
        self._lent: Lent | None = None
        self._refused: tuple[Holding, NotLendable] | None = None
        self._open: Publication | None = None
        """The last version, while it may still be read."""
        self._freed: tuple[int, ...] | None = None
        """What ``driver.freed`` said before all of it was last found to be there; None: it does not count all."""
        self._told = False
        """That this rank cannot lend what it has registered, and the daemon knows."""
        self._served: Connection | None = None
        """That chunks are handed over on."""

    def publish(self, step: int, deadline: Deadline) -> tuple[Publication | None, str]:
        """The version, lent; or why this step goes through host memory.

        Raises:
            NotLendable: ``mode="direct"``, and the weights cannot be lent.
            VersionConflict: as ``WeightWriter.publish``; ``details["set_changed"]``: another rank's weights changed;
                ``details["again"]``: these were rebound, have been looked up and are to be lent again.
        """
        writer = self._writer
        writer._check_newest()
        if writer._segment_ is None:
            writer._prepare(deadline)
        try:
            lent = self._declared(deadline)
        except NotLendable as error:
            if writer.mode == "direct":
                raise
            if not self._told and self._seen_to_lie_on_devices(writer._holding):
                self._choose(step, writer._segment, deadline, f"rank {writer.rank}: {error}"[:MAX_WHY])
                self._told = True
            return None, str(error)
        asked = {"step": step, "set": lent.layout.registered_set}
        if writer.mode == "auto":
            choice = self._choose(step, lent.layout, deadline)
            if not choice["borrowed"]:
                return None, choice["reason"]
        cuda.driver.synchronize(lent.devices)  # on every stream: what readers copy is what the caller sees
        self.take_back(deadline)
        if lent.sums is not None:
            if not self._all_there(self._counted(lent)) and lent.holding.watch.moved():
                raise self._moved(step)
            lent.sums.store()
        return self._lend(step, lent, {**asked, "segment": lent.segment}, deadline), ""

    def intends(self, holding: Holding) -> bool:
        """For a registration: whether this rank will declare that memory, without a look at each allocation."""
        refused = self._refused is not None and self._refused[0] is holding
        self._told = refused
        return not refused and self._seen_to_lie_on_devices(holding)

    def _seen_to_lie_on_devices(self, holding: Holding) -> bool:
        return all(cuda.driver.device_of(view) is not None for view in holding.views if view.numel)

    def _choose(
        self, step: int, layout: SegmentLayout, deadline: Deadline, why_not: str | None = None
    ) -> dict[str, Any]:
        """How all ranks publish that step. Ranks that will lend and are not so far yet are waited for, for a while."""
        asked = {"step": step, "set": layout.registered_set}
        seconds = deadline.left() if why_not else min(CHOICE_SECONDS, deadline.left() / 2)
        try:
            return self._writer._ask("write.choose", seconds, **asked, why_not=why_not)
        except NoAnswer:
            raise
        except DeadlineExceeded as error:
            if why_not or not deadline.left():
                raise
            return self._writer._ask("write.choose", deadline.left(), **asked, why_not=error.message[:MAX_WHY])

    def _lend(self, step: int, lent: Lent, asked: dict[str, Any], deadline: Deadline) -> Publication:
        """Looks at the tensors while readers are told, who begin once the memory is known to be there still.

        Whether they are the same tensors, where they were and of the same form, is looked at while readers copy: until
        then no update is a success. What is lent with checksums is known to be there: they were taken of it.
        """
        writer, words, watch = self._writer, lent.description.words, lent.holding.watch
        words.take_back()  # what an attempt at this step came to that another rank gave up
        words.say(Words.OFFERED, step)
        arguments = {**asked, "checksums": lent.sums is not None}
        sent = writer._connection.ask("write.borrow", arguments, timeout=deadline.left())
        freed = self._counted(lent)
        if lent.sums is not None or self._all_there(freed):
            words.say(Words.LOOKED, step)
        good = not watch.moved()
        if good:
            words.say(Words.LOOKED, step)
            good = not watch.rebound()
        if good:
            words.say(Words.SETTLED, step)
            self._freed = freed
        else:
            words.take_back()
        try:
            answer, _ = writer._connection.answer(sent)
        except AwexdError:
            words.take_back()
            raise
        attempt = answer["attempt"]
        writer._ask("write.affirm", deadline.left(), step=step, attempt=attempt, good=good)
        if not good:
            raise self._moved(step)
        self._open = publication = Publication(writer, step, lent=True)
        publication.epoch, publication._attempt = answer["epoch"], attempt
        # Others may find yet that theirs has moved: then it never was.
        publication._committed, publication.nbytes = answer["committed"] and writer.world_size == 1, lent.nbytes
        return publication

    def _counted(self, lent: Lent) -> tuple[int, ...] | None:
        """What the driver says of that memory's devices; None where it does not count all."""
        return None if self._freed is None else cuda.driver.freed(lent.devices)

    def _all_there(self, freed: tuple[int, ...] | None) -> bool:
        """Whether that says that nothing has been given back since all was last found to be there."""
        return freed is not None and freed == self._freed

    def _moved(self, step: int) -> VersionConflict:
        """The tensors are looked up where they are now; the error that has them lent again."""
        self._writer._refresh()
        return VersionConflict(f"{self._writer.job}: tensors were rebound since they were lent", {"again": True})

    def end(self, publication: Publication, timeout: float, *, at_once: bool) -> None:
        """Returns once no reader reads that version any more: every engine has it, or it was withdrawn ``at_once``."""
        writer, asked = self._writer, Deadline(timeout)

        def ask() -> None:
            writer._surviving(lambda deadline: self._end(publication, deadline, at_once=at_once), asked)

        if at_once:
            with _over_already():
                ask()
        else:
            self._lending_again(publication, ask, asked)
        if self._open is publication:
            self._open = None

    def await_commit(self, publication: Publication, timeout: float) -> None:
        """Returns once every rank has lent that version."""
        asked = Deadline(timeout)
        self._lending_again(publication, lambda: self._writer._await_commit(publication, asked.left()), asked)

    def _lending_again(self, publication: Publication, ask: Callable[[], None], deadline: Deadline) -> None:
        """Asks, and lends again what was lost: with a daemon, or where another rank's memory had moved meanwhile."""
        while True:
            try:
                return ask()
            except VersionConflict as error:
                if not error.details.get("retry"):
                    raise
            self._again(publication, deadline)

    def revoke(self, deadline: Deadline) -> None:
        """Takes the memory back; returns once no reader has it open, so that it can be freed."""
        self._writer._surviving(self._revoke, deadline)

    def _revoke(self, deadline: Deadline) -> None:
        if self._lent is not None:  # it went with the daemon that it was declared to
            self._writer._ask("write.revoke", deadline.left())
            self.forget()

    def forget(self) -> None:
        """What was declared is over: the daemon it was declared to has gone, or has taken it back."""
        lent, self._lent, self._open = self._lent, None, None
        if lent is not None:
            lent.description.close()

    def close(self) -> None:
        with contextlib.suppress(AwexdError):
            self._revoke(Deadline(CLOSE_SECONDS))
        self.forget()

    def let_go(self) -> None:
        self.forget()
        self._refused = None

    def _end(self, publication: Publication, deadline: Deadline, *, at_once: bool) -> None:
        attempted = {"epoch": publication.epoch, "step": publication.step, "attempt": publication._attempt}
        if at_once and self._lent is not None:
            self._lent.description.words.take_back()
        self._writer._ask("write.captured", deadline.left(), **attempted, at_once=at_once)

    def take_back(self, deadline: Deadline) -> None:
        """Withdraws the version before, if its caller has not waited for its end: other bytes may be there soon."""
        before, self._open = self._open, None
        if before is not None and not before._captured:
            with contextlib.suppress(VersionConflict, EpochChanged):  # it is over already
                self._end(before, deadline, at_once=True)

    def _again(self, publication: Publication, deadline: Deadline) -> None:
        """The version is gone; its bytes are still there."""
        writer = self._writer
        with writer._turn(deadline):
            again, why = self._publish_again(publication.step, deadline)
            if again is None:
                raise VersionConflict(
                    f"{writer.job}: step {publication.step} was lost and cannot be lent again ({why}); publish it again"
                )
            publication.epoch, publication._attempt = again.epoch, again._attempt
            publication._committed = again._committed

    def _publish_again(self, step: int, deadline: Deadline) -> tuple[Publication | None, str]:
        while True:
            try:
                return self._writer._surviving(lambda deadline: self.publish(step, deadline), deadline)
            except VersionConflict as error:
                if not error.details.get("again") or not deadline.left():
                    raise

    def _declared(self, deadline: Deadline) -> Lent:
        """This rank's memory, declared to the daemon if it is not yet, or is other memory now.

        Raises:
            NotLendable: why it cannot be.
        """
        writer = self._writer
        layout = writer._segment
        if self._lent is not None and self._lent.holding is writer._holding and self._lent.layout is layout:
            return self._lent
        self.revoke(deadline)
        writer._refresh()  # CUDA knows nothing of memory that was given back meanwhile
        holding = writer._holding
        if self._refused is not None and self._refused[0] is holding:
            raise self._refused[1]
        try:
            views = layout.sources(holding)
            self._freed = None
            devices = {device for view in views if (device := cuda.driver.device_of(view)) is not None}
            freed = cuda.driver.freed(sorted(devices))
            described = describe(views, [entry.tensor.name for entry in layout.manifest.pieces])
            if len(described.uuids) > MAX_GPUS:
                raise NotLendable(f"weights on {len(described.uuids)} GPUs; one process lends on {MAX_GPUS} at most")
        except NotLendable as error:
            self._refused = holding, error
            if writer.mode == "auto" and holding.on_device:
                _log.warning("%s goes through host memory: %s", writer.job, error)
            raise
        self._lent = self._declare(holding, layout, views, described, tuple(sorted(devices)), deadline)
        if not described.chunks and cuda.driver.counts(described.bases):
            self._freed = freed
        if described.chunks:
            self._serve_chunks()
        return self._lent

    def _sums(self, layout: SegmentLayout, views: tuple[View, ...], description: Description) -> OwnSums | None:
        if self._writer.verify_mode == "off":
            return None
        try:
            return OwnSums(layout.manifest, views, table_of(layout.manifest, description))
        except InvalidArgument as error:
            _log.warning(
                "%s is lent without checksums: readers compare with what is there: %s", self._writer.job, error
            )
            return None

    def _declare(
        self,
        holding: Holding,
        layout: SegmentLayout,
        views: tuple[View, ...],
        described: Described,
        devices: tuple[int, ...],
        deadline: Deadline,
    ) -> Lent:
        table_at, nbytes = size_of(described.body, layout.manifest)
        fd = lasting_memfd("awexd-lent", nbytes)
        try:
            write_description(fd, described.body, table_at)
            description = Description(fd, nbytes, layout.manifest, writable=True)
            try:
                sums = self._sums(layout, views, description)
                arguments = {"nbytes": nbytes, "devices": described.uuids}
                answer, _ = self._writer._call("write.lend", arguments, deadline.left(), [fd])
            except BaseException:
                description.close()
                raise
        finally:
            os.close(fd)
        size = sum(view.nbytes for view in views)
        return Lent(
            segment=answer["segment"],
            holding=holding,
            layout=layout,
            views=views,
            devices=devices,
            description=description,
            sums=sums,
            nbytes=size,
            chunks=described.chunks,
        )

    def _serve_chunks(self) -> None:
        """Hands chunks of virtual memory over, whenever a reader asks for some."""
        used = self._writer._connection
        if self._served is not used:
            self._served = used
            threading.Thread(target=self._hand_over, args=(used,), name="awexd-chunks", daemon=True).start()

    def _hand_over(self, used: Connection) -> None:
        while not used.over:
            try:
                asked, _ = used.call("write.asked", {}, timeout=MAX_DEADLINE_MS / 1000, patient=True)
                lent = self._lent
                if lent is None or lent.segment != asked["segment"]:
                    continue  # it was given up meanwhile
                for number in range(asked["first"], min(asked["first"] + asked["count"], len(lent.chunks))):
                    fd = cuda.driver.export(*lent.chunks[number])
                    try:
                        given = {"segment": lent.segment, "number": number}
                        used.call("write.give", given, timeout=GIVE_SECONDS, fds=[fd])
                    finally:
                        os.close(fd)
            except DeadlineExceeded:
                continue
            except AwexdError as error:
                _log.debug("%s: GPU memory is handed over no more: %s", self._writer.job, error)
                break
        if self._served is used:
            self._served = None


@contextlib.contextmanager
def _over_already() -> Iterator[None]:
    """What was lost need not be withdrawn."""
    try:
        yield
    except VersionConflict as error:
        if not error.details.get("retry"):
            raise
