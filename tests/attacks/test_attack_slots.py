"""Writers that misuse what was granted to them, or take what was granted to others."""

from __future__ import annotations

import os

import pytest

from awexd_transports.errors import DeadlineExceeded
from tests.attacks.raw import Raw, RawWriter, reader, until, writer
from tests.daemons import Daemon


def publish(trainer: RawWriter, step: int, slot: str) -> int:
    """Asks for it; the request's number."""
    return trainer.ask("write.publish", step=step, set=trainer.set, segment=slot, checksums=False)


def test_one_message_begins_seals_and_brings_the_next_slot(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        slot = trainer.call("write.slot")["segment"]
        for step in range(1, 6):
            answer, _ = trainer.answer(publish(trainer, step, slot))
            assert (answer["epoch"], answer["committed"]) == (1, True)
            slot = answer["next"]


def test_slot_of_another_rank_another_session_or_of_nobody_is_refused(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, writer(daemon.socket, "other") as other:
        foreign = other.call("write.slot")["segment"]
        held = trainer.publish(1)["segment"]
        for slot in (foreign, held, "../../etc/passwd", "x" * 256):
            error = trainer.refused("write.publish", step=2, set=trainer.set, segment=slot, checksums=False)
            assert error.code == "version_conflict"
        with pytest.raises(Exception, match="neither written nor leased"):
            trainer.answer(trainer.ask("segment.open", ids=[foreign]))
        assert other.answer(publish(other, 1, foreign))[0]["committed"]


def test_only_free_slots_of_its_own_may_be_mapped_ahead(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, writer(daemon.socket, "other") as other:
        free, foreign = trainer.segments, other.segments
        assert len(free) == 3
        _, fds = trainer.answer(trainer.ask("segment.open", ids=free))
        for fd in fds:
            os.close(fd)
        held = trainer.publish(1)["segment"]
        for slot in (held, foreign[0]):
            with pytest.raises(Exception, match="neither written nor leased"):
                trainer.answer(trainer.ask("segment.open", ids=[slot]))


def test_flood_of_requests_for_slots_gets_one_slot(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        numbers = [trainer.ask("write.slot") for _ in range(200)]
        assert len({trainer.answer(number)[0]["segment"] for number in numbers}) == 1
        trainer.publish(1)


def test_request_for_a_slot_has_a_deadline_and_names_who_holds_them(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, reader(daemon.socket) as slow:
        trainer.publish(1)
        slow.call("read.resolve", step=None, lease_ms=60_000, stage=False)
        for step in (2, 3):
            trainer.publish(step)
        with pytest.raises(DeadlineExceeded, match="readers' leases on epoch 1 step 1"):
            trainer.answer(trainer.ask("write.slot", deadline_ms=50))
        waiting = trainer.ask("write.slot")
        slow.close()
        assert trainer.answer(waiting)[0]["segment"]


def test_slot_is_asked_for_while_a_publication_of_it_waits_and_is_not_granted_twice(daemon: Daemon) -> None:
    """A client that would fill it again would write into a version."""
    with RawWriter(daemon.socket, rank=0, size=2) as first, RawWriter(daemon.socket, rank=1, size=2) as second:
        for trainer in (first, second):
            trainer.register()
        for trainer in (first, second):
            trainer.reserve()
        slot = first.call("write.slot")["segment"]
        second.close()
        until(daemon.socket, lambda status: status["jobs"][0]["writers"] == [0])
        waiting = publish(first, 1, slot)
        assert first.call("write.slot")["segment"] == slot, "it is still this writer's"
        with RawWriter(daemon.socket, rank=1, size=2) as back:
            back.register()
            assert first.answer(waiting)[0]["committed"] is False
            assert first.call("write.slot")["segment"] != slot
            again = first.refused("write.publish", step=1, set=first.set, segment="x", checksums=False)
            assert again.code == "version_conflict"
            back.reserve()
            back.publish(1)


def test_granted_slot_ends_with_its_session(daemon: Daemon) -> None:
    first = writer(daemon.socket)
    slot = first.call("write.slot")["segment"]
    with first.opened(slot) as fd:
        first.close()
        until(daemon.socket, lambda status: status["sessions"] == 1)
        with writer(daemon.socket) as second:
            assert slot not in [second.publish(step)["segment"] for step in range(1, 5)]
            os.pwrite(fd, b"late", 4096)


def test_nobody_but_a_writer_with_memory_is_granted_a_slot(daemon: Daemon) -> None:
    with RawWriter(daemon.socket) as trainer, Raw(daemon.socket) as nobody:
        trainer.register()
        assert trainer.refused("write.slot").code == "version_conflict"
        assert nobody.refused("write.slot").code == "invalid_argument"
