"""The engine's side of a job: registration, rounds, and which version an update gets."""

from __future__ import annotations

from awexd.store.mirroring import brought, check_failed, newest_listed, rest
from awexd.store.model import (
    MAX_OPEN_ROUNDS,
    Engine,
    Job,
    Round,
    Version,
    VersionKey,
    Wait,
    Worker,
    describe_keys,
    describe_ranks,
)
from awexd.store.registering import epoch_changed
from awexd_transports.errors import AwexdError, EpochChanged, InvalidArgument, VersionConflict, VersionUnavailable


def check(job: Job, worker: Worker, world_size: int) -> None:
    """Refuses what cannot be registered; changes nothing.

    Raises:
        InvalidArgument: the rank is not in the world.
        VersionConflict: another live process has that rank, or the world's size differs.
    """
    if worker.rank >= world_size:
        raise InvalidArgument(f"rank {worker.rank} in a world of {world_size}")
    engine = job.engines.get(worker.engine)
    if engine is None:
        return
    holder = engine.workers.get(worker.rank)
    if holder is not None and holder.session != worker.session:
        raise VersionConflict(
            f"{job.name}: rank {worker.rank} of engine {engine.name} is registered by process {holder.pid}, which lives"
        )
    if engine.world_size != world_size and engine.workers.keys() - {worker.rank}:
        raise VersionConflict(f"{job.name}: engine {engine.name} has {engine.world_size} workers, not {world_size}")


def register(job: Job, worker: Worker, world_size: int) -> None:
    """Registers one worker of an engine, which has been checked, joining the round that its engine is in."""
    engine = job.engines.setdefault(worker.engine, Engine(worker.engine, world_size))
    engine.world_size = world_size
    worker.epoch = job.epoch
    worker.round = _round_to_join(engine, worker.rank)
    engine.workers[worker.rank] = worker
    elsewhere = engine.spanning is not None and engine.spanning.others  # as far as is known yet
    engine.whole = engine.whole or not (engine.absent or elsewhere)


def resume(engine: Engine, worker: Worker, updates: int) -> list[str]:
    """Takes up a worker's count of updates after a restart; the leases that end with it.

    Its last one is a round that siblings may not have finished: they must get the same version.
    """
    worker.round, worker.placed = updates, True
    if updates and worker.version:
        last = engine.rounds.setdefault(updates - 1, Round(worker.version))
        if last.key == worker.version:
            last.confirmed.add(worker.rank)
    return close_completed(engine)


def siblings(job: Job, worker: Worker) -> Wait | list[str]:
    """The manifests of every worker of the engine, once all have registered, on this node or another."""
    engine = job.engines[worker.engine]
    digests = engine.spanning.digests if engine.spanning is not None else {}
    digests = digests | {rank: one.digest for rank, one in engine.workers.items()}
    absent = set(range(engine.world_size)) - digests.keys()
    if absent:
        return Wait(job.name, lambda: f"{describe_ranks(absent)} of engine {engine.name} to register")
    return [digests[rank] for rank in range(engine.world_size)]


def choose(job: Job, worker: Worker, step: int | None, stage: bool) -> Wait | Version:
    """The version that this worker's next update gets: its round's, else that step, else the newest.

    Raises:
        VersionUnavailable: it is not held, and never will be (again).
        VersionConflict: another worker of the engine has fixed another step for this round.
        EpochChanged: the step was waited for in an epoch that is over.
    """
    engine = job.engines[worker.engine]
    if worker.round not in engine.rounds and any(number > worker.round for number in engine.rounds):
        worker.round = _round_to_join(engine, worker.rank)
    current = None if stage else engine.rounds.get(worker.round)
    nothing = current is not None and _came_to_nothing(job, current)
    if current is not None and (nothing or _may_skip(engine, current, worker.rank, step)):
        # Its update to this version failed, and it goes on to another, with no sibling in the middle.
        if siblings := current.active - {worker.rank}:
            who, what = f"{describe_ranks(siblings)} of engine {engine.name}", describe_keys([current.key])[6:]
            return Wait(job.name, lambda: f"{who} to end their update to {what}")
        if nothing:  # then it is the same update, for all of them
            del engine.rounds[worker.round]
        else:
            current.confirmed.add(worker.rank)
            worker.round += 1
        current = engine.rounds.get(worker.round)
    if current is not None:
        fixed = _of_round(job, engine, worker, current, step)
        return fixed if worker.finds(fixed) else rest(job, worker, fixed)
    return pick(job, worker, step)


def pick(job: Job, worker: Worker, step: int | None) -> Wait | Version:
    """The version that a new round of this worker's engine is to be for; see ``choose``."""
    if step is None:
        held = visible(job, worker)
        if not held:
            check_transport(job, worker)
            check_failed(job)
            if partial := [version for version in job.held() if not worker.finds(version)]:
                return rest(job, worker, partial[0])
        if worker.version and worker.version == job.returned and not (held and held[0].key > job.returned):
            return Wait(
                job.name, lambda: f"a version after step {job.high} of epoch {job.epoch}; {job.describe_held()}"
            )
        return held[0] if held else Wait(job.name, lambda: _first(job))
    found = job.held_of(job.epoch, step) or job.held_of(worker.epoch, step)
    if found is not None and worker.takes(found):
        return found
    if found is not None and not worker.finds(found):
        return rest(job, worker, found)
    check_transport(job, worker)
    if found is not None:
        raise VersionUnavailable(
            f"{job.name}: {found} is lent by its trainer, whose GPU memory this worker does not open; "
            f"{job.describe_held()}",
            _held(job),
        )
    _check_epoch(job, worker)
    coming = brought(job, step)
    if coming is not None:
        return coming
    if step <= job.high:
        raise VersionUnavailable(f"{job.name}: step {step} is not held any more; {job.describe_held()}", _held(job))
    return _still_to_come(job, step)


def _came_to_nothing(job: Job, current: Round) -> bool:
    """Its version has gone, and nobody has got it: the round may have another, for all."""
    version = job.versions.get(current.key)
    return not current.confirmed and (version is None or version.withdrawn)


def awaited(job: Job, engine: Engine | None, step: int | None) -> Wait | None:
    """None once the workers of that engine need not wait for what an update of them gets: a version, or an error."""
    workers = list(engine.workers.values()) if engine is not None else []
    if step is None:
        held = [version for version in job.held() if all(one.takes(version) for one in workers)]
        had = job.returned if any(one.version == job.returned for one in workers) else None
        failed = not held and job.mirror is not None and newest_listed(job) in job.mirror.failed
        if failed or (held and (had is None or held[0].key > had)):
            return None
        return Wait(job.name, lambda: f"its next version ({_newest(job)})" if had else _first(job))
    try:
        coming = brought(job, step)
    except AwexdError:
        return None
    if coming is not None and not job.held_of(job.epoch, step):
        return coming
    over = step <= job.high or (job.epoch and any(one.epoch not in (0, job.epoch) for one in workers))
    if over or job.held_of(job.epoch, step):
        return None
    return _still_to_come(job, step)


def visible(job: Job, worker: Worker) -> list[Version]:
    """Versions that this worker can read, newest first."""
    return [version for version in job.held() if worker.takes(version)]


def check_transport(job: Job, worker: Worker) -> None:
    """
    Raises:
        VersionUnavailable: what the trainer publishes from now on is nothing that this worker can read.
    """
    modes = {writer.mode for writer in job.writers.values()}
    named = f"rank {worker.rank} of engine {worker.engine}"
    if job.mirror is not None and job.mirror.sends and not job.writers:
        modes = {"nccl"}
    if worker.exchanges and job.mirror is not None and job.mirror.nodes:
        raise VersionUnavailable(
            f'{job.name}: its trainer is on another node, without transport="nccl"; pass that to its WeightWriter too, '
            f"or not to {named}"
        )
    if modes and worker.exchanges != (modes == {"nccl"}):
        who, other = (named, "its WeightWriter") if worker.exchanges else ("its trainer", named)
        raise VersionUnavailable(f'{job.name}: {who} has transport="nccl"; pass that to {other} too, or to neither')


def newest_since(job: Job, worker: Worker, step: int) -> Wait | VersionKey:
    """The newest version, once it is at least ``step``.

    Raises:
        EpochChanged: the epoch in which that was to come is over.
    """
    held = visible(job, worker)
    if held and held[0].key[0] in (worker.epoch, job.epoch) and held[0].key[1] >= step:
        return held[0].key
    _check_epoch(job, worker)
    if newest_listed(job) >= (job.epoch, step):
        check_failed(job)
    return Wait(job.name, lambda: f"a version of step {step} or later ({_newest(job)})")


def open_round(engine: Engine, worker: Worker, key: VersionKey) -> list[str]:
    """Opens the worker's round for that version if it is not open yet; the leases that end with rounds left behind."""
    current = engine.rounds.setdefault(worker.round, Round(key))
    current.active.add(worker.rank)
    ended: list[str] = []
    for number in sorted(engine.rounds)[: max(0, len(engine.rounds) - MAX_OPEN_ROUNDS)]:
        if not engine.rounds[number].active:
            ended += engine.rounds.pop(number).holds
    return ended


def confirm(engine: Engine, worker: Worker, key: VersionKey) -> list[str]:
    """This worker runs on that version now; the leases that end with it."""
    worker.state, worker.version, worker.epoch = "ready", key, key[0]
    current = engine.rounds[worker.round]
    current.confirmed.add(worker.rank)
    current.active.discard(worker.rank)
    worker.round += 1
    return close_completed(engine)


def give_up(engine: Engine, worker: Worker) -> list[str]:
    """This worker's update failed: its retry joins the same round, unless nobody has got anything in it yet."""
    current = engine.rounds.get(worker.round)
    if engine.spanning is not None:
        engine.spanning.gave_up(worker.round, worker.rank)
    if current is None:
        return []
    current.active.discard(worker.rank)
    current.failed.add(worker.rank)
    return _drop_unused(engine)


def leave(engine: Engine, worker: Worker) -> list[str]:
    """A worker's session has ended; the leases that end with it."""
    if engine.workers.get(worker.rank) is worker:
        del engine.workers[worker.rank]
        # What it had confirmed went with its process: its successor takes part in those rounds anew.
        for current in engine.rounds.values():
            current.confirmed.discard(worker.rank)
            current.active.discard(worker.rank)
    ended = _drop_unused(engine)
    if worker.wish is not None:
        ended.append(worker.wish.lease)
        worker.wish = None
    if not engine.workers:
        ended += engine.spanning.leases() if engine.spanning is not None else []
        ended += [lease for current in engine.rounds.values() for lease in current.holds]
        engine.rounds.clear()
    return ended


def close_completed(engine: Engine) -> list[str]:
    """Ends the rounds that every worker has confirmed; the leases that end with them."""
    ended: list[str] = []
    for number, current in list(engine.rounds.items()):
        if len(current.confirmed) == engine.world_size:
            engine.completed = current.key
            ended += current.holds
            del engine.rounds[number]
    return ended


def _drop_unused(engine: Engine) -> list[str]:
    """Ends rounds in which nobody has got or is getting anything; the leases that end with them."""
    ended: list[str] = []
    for number, current in list(engine.rounds.items()):
        if not current.confirmed and not current.active:
            ended += current.holds
            del engine.rounds[number]
    return ended


def _of_round(job: Job, engine: Engine, worker: Worker, current: Round, step: int | None) -> Version:
    version = job.versions.get(current.key)
    if version is None or version.withdrawn:
        number = worker.round
        worker.round += 1
        raise VersionUnavailable(
            f"{job.name}: update {number} of engine {engine.name} was fixed to {describe_keys([current.key])[6:]}, "
            f"which is not held any more; {job.describe_held()}",
            _held(job),
        )
    if step is not None and step != current.key[1]:
        raise VersionConflict(
            f"{job.name}: this update of engine {engine.name} was fixed to step {current.key[1]} by its first worker; "
            f"rank {worker.rank} asks for step {step}"
        )
    return version


def _round_to_join(engine: Engine, rank: int) -> int:
    open_rounds = [number for number, current in engine.rounds.items() if rank not in current.confirmed]
    if open_rounds:
        return max(open_rounds)
    return max((worker.round for worker in engine.workers.values()), default=0)


def _may_skip(engine: Engine, current: Round, rank: int, step: int | None) -> bool:
    """By number, to a later step, or back to the last that every worker had."""
    later = step is not None and step > current.key[1]
    back = engine.completed is not None and engine.completed[1] == step != current.key[1]
    return (later or back) and rank in current.failed


def _newest(job: Job) -> str:
    return job.describe_held() + _elsewhere(job) if job.held() else _trainer(job)


def _first(job: Job) -> str:
    return f"its first committed version ({_trainer(job)})"


def _still_to_come(job: Job, step: int) -> Wait:
    return Wait(
        job.name, lambda: f"step {step} of epoch {job.epoch} to be committed; {job.describe_held()}{_elsewhere(job)}"
    )


def _elsewhere(job: Job) -> str:
    return f"; {job.mirror.doing()}" if job.mirror is not None else ""


def _trainer(job: Job) -> str:
    """What the trainer lacks for a version, as far as it is known."""
    if job.mirror is not None:
        return job.mirror.doing()
    if not job.epoch and not job.pending:
        return "no trainer has registered under this name; another user's job is OWNER/NAME"
    absent = [rank for rank in range(job.world_size) if rank not in job.writers]
    if absent:
        return f"{describe_ranks(absent)} of {job.world_size} not registered"
    return f"all {job.world_size} ranks are registered, nothing is committed"


def _check_epoch(job: Job, worker: Worker) -> None:
    """Tells a worker once that its epoch is over; from then on it is in the new one."""
    if not job.epoch:
        return  # it came from another node, before its trainer did
    seen, worker.epoch = worker.epoch, job.epoch
    if seen and seen != job.epoch:
        error: EpochChanged = epoch_changed(job, seen)
        raise error


def _held(job: Job) -> dict[str, list[list[int]]]:
    return {"held": [list(version.key) for version in job.held()]}
