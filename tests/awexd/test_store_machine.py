"""Any interleaving of writers, readers, ends and restarts, against a simple model of what was published."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from awexd.store import Segment, Store, Version, Wait
from awexd.store.model import Job, Lease
from awexd.store.writing import Begun
from tests.awexd.store_clients import JOB, NBYTES, Engine, Trainer
from tests.awexd.store_model import StoreModel

LEASE_SECONDS = 60.0


class StoreMachine(StoreModel):
    """Trainers of ``size`` ranks, engines of ``workers`` ranks; every call may be refused, none may break a promise."""

    @initialize(size=st.integers(1, 3), workers=st.integers(1, 3), keep=st.integers(1, 3))
    def open(self, size: int, workers: int, keep: int) -> None:
        self.size, self.workers, self.keep = size, workers, keep
        for rank in range(size):
            self.trainer_comes(rank, new=False)
        for rank in range(workers):
            self.engine_comes(rank, "e")
        for trainer in self.trainers:
            trainer.reserve()

    # what clients do

    @rule(times=st.integers(1, 4))
    @precondition(lambda self: self.trainers)
    def all_ranks_publish(self, times: int) -> None:
        for _ in range(times):
            step = self._next_step()
            for trainer in list(self.trainers):
                self._reserve(trainer)
                self._begin(trainer, step)
            for trainer in list(self.trainers):
                if trainer.session.id in self.begun:
                    self._seal(trainer)

    @rule(times=st.integers(1, 4))
    @precondition(lambda self: self.trainers)
    def all_ranks_publish_what_they_have_filled(self, times: int) -> None:
        for trainer in list(self.trainers):
            self._reserve(trainer)
        for _ in range(times):
            step = self._next_step()
            for trainer in list(self.trainers):
                self._grant(trainer)
            for trainer in list(self.trainers):
                self._publish_filled(trainer, step)

    @rule(data=st.data())
    @precondition(lambda self: self.trainers)
    def trainer_is_granted_a_slot(self, data: st.DataObject) -> None:
        self._grant(data.draw(st.sampled_from(self.trainers)))

    def _grant(self, trainer: Trainer) -> None:
        outcome = self._try(trainer.try_grant)
        if isinstance(outcome, Wait):
            self._check_wait(outcome)
        if not isinstance(outcome, Segment):
            return
        session = trainer.session.id
        known = self.granted.get(session)
        assert known in (None, outcome.id) or self.slots[known].condemned, "two slots for one session"
        self._handed_out(outcome, session)
        self.granted[session] = outcome.id

    @rule(data=st.data(), ahead=st.sampled_from([-1, 0, 0, 0, 1, 2]), again=st.booleans())
    @precondition(lambda self: self.granted)
    def trainer_publishes_what_it_has_filled(self, data: st.DataObject, ahead: int, again: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.granted)))
        trainer = next(t for t in self.trainers if t.session.id == session)
        slot, step = self.granted[session], max(0, self._next_step() + ahead)
        number = self._publish_filled(trainer, step)
        if again and number is not None and JOB in self.world.store.jobs:
            repeated = self._try(lambda: trainer.try_publish_filled(step, slot))
            assert repeated in (None, number), "the repeated request began another attempt"

    def _publish_filled(self, trainer: Trainer, step: int) -> int | None:
        """The attempt's number, if it could be."""
        session = trainer.session.id
        if session not in self.granted:
            return None
        slot = self.granted[session]
        before = set(self.world.job.versions) if JOB in self.world.store.jobs else set()
        outcome = self._try(lambda: trainer.try_publish_filled(step, slot))
        if isinstance(outcome, Wait):
            self._check_wait(outcome)
        if not isinstance(outcome, Begun):
            return None
        attempt = outcome.attempt
        assert (attempt.epoch, step) not in self.dead_steps, "a step was used again"
        del self.granted[session]
        self.begun.pop(session, None)  # a step that was left unsealed
        self._stops_writing(trainer)
        self.slots[slot].content = (attempt.epoch, step, attempt.number)
        self.sealed.setdefault(attempt.number, {})[trainer.rank] = (slot, session)
        version = self.world.job.versions.get((attempt.epoch, step))
        if version is not None and version.key not in before:
            self._committed(version, before)
        return attempt.number

    @rule(name=st.sampled_from(["e", "f"]), reverse=st.booleans())
    @precondition(lambda self: self.engines)
    def all_workers_update(self, name: str, reverse: bool) -> None:
        for engine in sorted(self.engines, key=lambda e: e.rank, reverse=reverse):
            if engine.name == name:
                self._resolve(engine, None, stage=False)
                if engine.session.id in self.leases:
                    self._confirm(engine)

    @rule(rank=st.integers(0, 2), new=st.booleans())
    def trainer_comes(self, rank: int, new: bool) -> None:
        trainer = Trainer(self.world, rank % self.size, self.size, keep=self.keep)
        self.trainers.append(trainer)
        self._try(lambda: trainer.register("new" if new else "continue"))

    @rule(data=st.data(), size=st.sampled_from([NBYTES, NBYTES, 2 * NBYTES]))
    @precondition(lambda self: self.trainers)
    def trainer_reserves(self, data: st.DataObject, size: int) -> None:
        trainer = data.draw(st.sampled_from(self.trainers))
        trainer.nbytes = size
        self._reserve(trainer)

    def _reserve(self, trainer: Trainer) -> None:
        def reserve() -> None:
            if not isinstance(self.world.store.ready(trainer.session), Wait):
                slot = self.granted.pop(trainer.session.id, None)
                if slot is not None:
                    self.slots[slot].writers.discard(trainer.session.id)
                trainer.reserve()

        self._try(reserve)

    @rule(data=st.data(), ahead=st.sampled_from([-1, 0, 0, 0, 1, 2]))
    @precondition(lambda self: self.trainers)
    def trainer_begins(self, data: st.DataObject, ahead: int) -> None:
        self._begin(data.draw(st.sampled_from(self.trainers)), max(0, self._next_step() + ahead))

    def _begin(self, trainer: Trainer, step: int) -> None:
        outcome = self._try(lambda: trainer.try_begin(step))
        if isinstance(outcome, Wait):
            self._check_wait(outcome)
        if not isinstance(outcome, Begun):
            return
        session = trainer.session.id
        assert (outcome.attempt.epoch, step) not in self.dead_steps, "a step was used again"
        granted = self.granted.pop(session, None)
        assert granted in (None, outcome.segment.id) or self.slots[granted].condemned, "another than the granted slot"
        self._stops_writing(trainer)
        self._handed_out(outcome.segment, session)
        self.slots[outcome.segment.id].content = (outcome.attempt.epoch, step, outcome.attempt.number)
        self.begun[session] = outcome

    @rule(data=st.data(), abort=st.booleans())
    @precondition(lambda self: self.begun)
    def trainer_seals_or_aborts(self, data: st.DataObject, abort: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.begun)))
        trainer = next(t for t in self.trainers if t.session.id == session)
        if not abort:
            self._seal(trainer)
            return
        begun = self.begun.pop(session)
        self.slots[begun.segment.id].writers.discard(session)
        self._try(lambda: trainer.abort(begun))
        self.sealed.pop(begun.attempt.number, None)

    def _seal(self, trainer: Trainer) -> None:
        session = trainer.session.id
        begun = self.begun.pop(session)
        number, rank = begun.attempt.number, trainer.rank
        self.slots[begun.segment.id].writers.discard(session)
        before = set(self.world.job.versions) if JOB in self.world.store.jobs else set()
        version = self._try(lambda: trainer.seal(begun) or True)
        if version is None:
            return
        self.sealed.setdefault(number, {})[rank] = (begun.segment.id, session)
        if isinstance(version, Version):
            self._committed(version, before)

    @rule(rank=st.integers(0, 2), name=st.sampled_from(["e", "f"]))
    def engine_comes(self, rank: int, name: str) -> None:
        engine = Engine(self.world, rank % self.workers, self.workers, name)
        self.engines.append(engine)
        self._try(engine.register)

    @rule(data=st.data(), back=st.none() | st.integers(-1, 3), stage=st.booleans())
    @precondition(lambda self: self.engines)
    def engine_resolves(self, data: st.DataObject, back: int | None, stage: bool) -> None:
        step = None if back is None else max(0, self._next_step() - 1 - back)
        self._resolve(data.draw(st.sampled_from(self.engines)), step, stage)

    def _resolve(self, engine: Engine, step: int | None, stage: bool) -> None:
        if not stage:
            self.leases.pop(engine.session.id, None)  # whoever asks for another has given that one up
        outcome = self._try(lambda: engine.try_resolve(step, LEASE_SECONDS, stage=stage))
        if isinstance(outcome, Wait):
            self._check_wait(outcome)
        if not isinstance(outcome, Lease):
            return
        version = self.world.job.versions[outcome.key]
        assert not version.withdrawn
        assert step is None or outcome.key[1] == step
        for segment_id in version.segments:
            slot = self.slots[segment_id]
            assert slot.content
            assert slot.content[:2] == outcome.key, "other bytes than the version's"
        if not stage:
            self.leases[engine.session.id] = outcome

    @rule(data=st.data(), how=st.sampled_from(["confirm", "confirm", "confirm", "release", "dirty"]))
    @precondition(lambda self: self.leases)
    def engine_ends_its_update(self, data: st.DataObject, how: str) -> None:
        session = data.draw(st.sampled_from(sorted(self.leases)))
        engine = next(e for e in self.engines if e.session.id == session)
        if how == "confirm":
            self._confirm(engine)
            return
        lease = self.leases.pop(session)
        self._try(lambda: engine.release(lease, dirty=how == "dirty"))

    def _confirm(self, engine: Engine) -> None:
        lease = self.leases.pop(engine.session.id)
        worker = engine.session.worker[1] if engine.session.worker else None
        number = worker.round if worker else 0
        expired = lease.expires <= self.world.now
        version = self.world.job.versions.get(lease.key)
        key = self._try(lambda: engine.confirm(lease))
        if key is None and worker and version and version.withdrawn and not expired:
            # It may not have waited for that answer, and runs on the version; or it says that it does not.
            assert (worker.state, worker.version, worker.round) == ("ready", lease.key, number + 1)
            if number % 2:
                self._try(lambda: engine.release(lease, dirty=True))
                assert (worker.state, worker.version) == ("dirty", None)
        if key is None:
            return
        assert not expired, "an update whose lease had run out was a success"
        assert worker
        assert (worker.state, worker.version) == ("ready", lease.key)
        assert worker.round == number + 1

    @rule(data=st.data(), stage=st.booleans())
    @precondition(lambda self: self.engines)
    def engine_overstays_its_lease(self, data: st.DataObject, stage: bool) -> None:
        self._resolve(data.draw(st.sampled_from(self.engines)), None, stage=stage)
        self.time_passes(LEASE_SECONDS)

    @rule(data=st.data())
    @precondition(lambda self: self.engines and self.newest)
    def engine_is_updating_when_its_version_is_withdrawn(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        self._resolve(engine, None, stage=False)
        self.withdraw(data, drop=True)
        if engine.session.id in self.leases:
            self._confirm(engine)

    # what befalls them

    @rule(data=st.data(), unmapped=st.booleans(), replaced=st.booleans())
    @precondition(lambda self: self.trainers or self.engines)
    def session_ends(self, data: st.DataObject, unmapped: bool, replaced: bool) -> None:
        clients: list[Trainer | Engine] = [*self.trainers, *self.engines]
        client = data.draw(st.sampled_from(clients))
        session = client.session.id
        for segment_id, slot in self.slots.items():
            segment = self._segment(segment_id)
            if not unmapped and (session in slot.writers or (segment and session in segment.users)):
                slot.condemned = True
            slot.writers.discard(session)
        client.end(unmapped=unmapped)
        self.begun.pop(session, None)
        self.granted.pop(session, None)
        self.leases.pop(session, None)
        self.trainers = [t for t in self.trainers if t is not client]
        self.engines = [e for e in self.engines if e is not client]
        if replaced and isinstance(client, Trainer):
            self.trainer_comes(client.rank, new=False)
        elif replaced and isinstance(client, Engine):
            self.engine_comes(client.rank, client.name)

    @rule(seconds=st.sampled_from([1.0, 30.0, LEASE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        expiring = [lease for lease in self.world.store.leases.values() if lease.session]
        for lease in expiring:
            if lease.expires <= self.world.now + seconds:
                for segment_id in self.world.job.versions[lease.key].segments:
                    self.slots[segment_id].condemned = True
        self.world.advance(seconds)

    @rule(data=st.data(), drop=st.booleans())
    @precondition(lambda self: JOB in self.world.store.jobs and self.world.held())
    def withdraw(self, data: st.DataObject, drop: bool) -> None:
        step = data.draw(st.sampled_from(self.world.held()))[1]
        act = self.world.store.drop if drop else self.world.store.rollback
        for gone in self._try(lambda: act(self.world.job, step)) or []:
            self.dead_steps.add(gone.key)
            self.withdrawn.add(gone.key)
        held = self.world.held()
        self.newest = held[0] if held else None

    @rule(leave=st.booleans())
    @precondition(lambda self: JOB in self.world.store.jobs and len(self.dead_steps) > 3)
    def close_job(self, leave: bool) -> None:
        self.world.store.close_job(self.world.job)
        self.world.drain()
        assert self.world.store.leases == {}
        self.begun.clear()
        self.granted.clear()
        self.leases.clear()
        self.dead_steps.clear()
        self.newest = None
        if leave:
            clients: list[Trainer | Engine] = [*self.trainers, *self.engines]
            for client in clients:
                client.end()
            self.trainers, self.engines = [], []

    @rule()
    @precondition(lambda self: JOB in self.world.store.jobs and self.world.held())
    def restart(self) -> None:
        """What adoption does: whole versions, by their segments, into a new store; who maps them is not known."""
        old = self.world.job
        store = Store(next(self.attempts) << 20)
        job = Job(JOB, 0, epoch=old.epoch, world_size=old.world_size, keep=old.keep, high=old.high)
        held = self.world.held()
        for version in sorted(old.versions.values(), key=lambda v: v.key):
            if version.withdrawn:
                continue
            segments = [
                Segment(s.id, s.rank, s.nbytes, digest=s.digest) for s in (old.segments[i] for i in version.segments)
            ]
            kept = (version.key, version.attempt, version.segments, version.digests)
            store.jobs.setdefault(JOB, job)
            store.adopt(job, Version(*kept, version.set_digest, version.nbytes), segments)
        store.jobs.setdefault(JOB, job)
        self.world.store = store
        self.world.drain()
        for slot in self.slots.values():
            slot.condemned = True
        self.trainers, self.engines = [], []
        self.begun.clear()
        self.granted.clear()
        self.leases.clear()
        for rank in range(self.size):
            self.trainer_comes(rank, new=False)
        assert self.world.held()[: len(held)] == held[: max(job.keep, 1)]


StoreMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase
