"""What clients did to a store and were promised, and what must hold whatever they do next."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from awexd.store import Segment, Store, Version, Wait
from awexd.store.model import Lease
from awexd.store.writing import Begun
from awexd_transports.errors import AwexdError
from tests.awexd.store_clients import JOB, Engine, Trainer, World, check


class Bytes:
    """The model of one slot: whose bytes it has, and who may still be writing or reading it."""

    def __init__(self) -> None:
        self.content: tuple[int, int, int] | None = None
        """(epoch, step, attempt) of the last begin that got it."""
        self.writers: set[str] = set()
        self.condemned = False


class StoreModel(RuleBasedStateMachine):
    """A simple model of what was published, beside the store itself; the rules are its subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = itertools.count(1)
        self.world = World(Store(next(self.attempts) << 20))
        self.trainers: list[Trainer] = []
        self.begun: dict[str, Begun] = {}
        self.granted: dict[str, str] = {}
        """Slots that sessions are filling, for a step that they have not named yet."""
        self.engines: list[Engine] = []
        self.leases: dict[str, Lease] = {}
        self.slots: dict[str, Bytes] = {}
        self.sealed: dict[int, dict[int, tuple[str, str]]] = {}
        self.dead_steps: set[tuple[int, int]] = set()
        self.withdrawn: set[tuple[int, int]] = set()
        self.newest: tuple[int, int] | None = None

    def _next_step(self) -> int:
        return self.world.job.high + 1 if JOB in self.world.store.jobs else 0

    def _handed_out(self, segment: Segment, session: str) -> None:
        slot = self.slots.setdefault(segment.id, Bytes())
        assert not slot.condemned, "memory that somebody may still touch was handed out"
        held = [v for v in self.world.job.versions.values() if segment.id in v.segments]
        assert not held, f"the slot of {held} was handed out"
        others = slot.writers - {session}
        assert not others, f"session {others} may still be writing it"
        slot.writers.add(session)

    def _committed(self, version: Version, before: set[tuple[int, int]]) -> None:
        parts = self.sealed[version.attempt]
        assert sorted(parts) == list(range(len(version.segments))), "a rank had not sealed"
        assert [parts[rank][0] for rank in sorted(parts)] == list(version.segments)
        assert version.key not in before
        assert version.key not in self.dead_steps
        assert self.newest is None or version.key > self.newest or version.key[0] > self.newest[0]
        self.newest = version.key
        self.dead_steps.add(version.key)

    # what must hold

    @invariant()
    def consistent(self) -> None:
        check(self.world)

    @invariant()
    def newest_is_held(self) -> None:
        if self.newest is not None:
            held = self.world.held()
            assert held, "the last held version is lost"
            assert held[0] == self.newest

    @invariant()
    def nothing_is_left_of_ended_sessions(self) -> None:
        store = self.world.store
        for job in store.jobs.values():
            registered = [w.session for w in job.writers.values()]
            registered += [w.session for w in job.pending.writers.values()] if job.pending else []
            registered += [w.session for e in job.engines.values() for w in e.workers.values()]
            assert set(registered) <= store.sessions.keys()
            assert all(e.workers for e in job.engines.values()), "an engine of nobody"
            for segment in job.segments.values():
                if segment.writable:
                    assert any(segment.users & {s} for s in store.sessions), "nobody writes it"

    @invariant()
    def rounds_are_of_one_version(self) -> None:
        for job in self.world.store.jobs.values():
            for engine in job.engines.values():
                # One that had its version when that was withdrawn stays there; its siblings get another.
                there = [w for w in engine.workers.values() if w.state == "ready" and w.version not in self.withdrawn]
                versions = {(w.round, w.version) for w in there}
                rounds = [number for number, _ in versions]
                assert len(rounds) == len(set(rounds)), f"workers after one number of updates differ: {versions}"

    # how

    def _try(self, action: Callable[[], Any]) -> Any:
        """The action's result; None if it was refused, which anything may be, by an error of ours with a message."""
        try:
            return action()
        except AwexdError:
            return None
        finally:
            self.world.drain()

    def _check_wait(self, wait: Wait) -> None:
        assert wait.reason.startswith(JOB)
        assert len(wait.reason) > len(JOB) + 8, "names nobody"
        assert not wait.reason.rstrip().endswith((";", "and")), wait.reason

    def _segment(self, segment_id: str) -> Segment | None:
        job = self.world.store.jobs.get(JOB)
        return job.segments.get(segment_id) if job else None

    def _stops_writing(self, trainer: Trainer) -> None:
        for slot in self.slots.values():
            slot.writers.discard(trainer.session.id)
