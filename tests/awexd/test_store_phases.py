"""Claims to phases of GPUs: who shares, who waits, who goes first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from awexd.store.phases import Claim, Phases
from awexd_transports.errors import InvalidArgument


class Queue:
    """Phases, and a clock that counts claims."""

    def __init__(self) -> None:
        self.phases = Phases()
        self._numbers = itertools.count()

    def claim(self, phase: str, *gpus: str) -> Claim:
        number = next(self._numbers)
        who = f"client {number}"
        made = Claim(f"t{number}", f"s{number}", "root/j", who, number, 0, phase, gpus or ("g",), float(number))
        self.phases.claim(made)
        self.phases.advance(0.0)
        return made

    def leave(self, claim: Claim) -> None:
        assert self.phases.leave(claim.session, claim.uid, claim.token)
        self.phases.advance(0.0)


def test_one_phase_is_shared_and_the_other_waits_for_all_of_its_holders() -> None:
    queue = Queue()
    first, second, engine = queue.claim("train"), queue.claim("train"), queue.claim("rollout")
    assert (first.inside, second.inside, engine.inside) == (True, True, False)
    queue.leave(first)
    assert not engine.inside
    assert queue.phases.blocking(engine) == [second]
    queue.leave(second)
    assert engine.inside


def test_newcomers_of_the_current_phase_queue_behind_who_waits_for_the_other() -> None:
    queue = Queue()
    first, engine, late = queue.claim("train"), queue.claim("rollout"), queue.claim("train")
    assert not late.inside
    queue.leave(first)
    assert (engine.inside, late.inside) == (True, False)
    queue.leave(engine)
    assert late.inside


def test_several_gpus_are_got_at_once_or_not_at_all() -> None:
    queue = Queue()
    first, both = queue.claim("train", "a"), queue.claim("rollout", "a", "b")
    assert not both.inside
    apart, behind = queue.claim("train", "c"), queue.claim("train", "b")
    assert (apart.inside, behind.inside) == (True, False)
    queue.leave(first)
    assert (both.inside, behind.inside) == (True, False)


def test_case_28_ids_are_compared_exactly() -> None:
    queue = Queue()
    assert queue.claim("train", "GPU-1").inside
    assert all(queue.claim("rollout", gpu).inside for gpu in ("gpu-1", "GPU-11", "MIG-1", "0"))


def test_claim_that_is_given_up_lets_those_behind_it_in() -> None:
    queue = Queue()
    queue.claim("train")
    engine, late = queue.claim("rollout"), queue.claim("train")
    queue.leave(engine)
    assert late.inside


def test_end_of_a_session_leaves() -> None:
    queue = Queue()
    first, engine = queue.claim("train"), queue.claim("rollout")
    assert queue.phases.end_session(first.session)
    queue.phases.advance(0.0)
    assert engine.inside
    assert not queue.phases.end_session(first.session)


def test_one_session_has_one_claim_and_nobody_leaves_for_another() -> None:
    queue = Queue()
    first = queue.claim("train")
    again = Claim("t9", first.session, "root/j", "client 0", 0, 0, "train", ("g",), 0.0)
    with pytest.raises(InvalidArgument, match="a phase already"):
        queue.phases.claim(again)
    assert not queue.phases.leave("other", first.uid, first.token)
    assert not queue.phases.leave(first.session, 7, first.token)
    stolen = Claim(first.token, "other", "root/j", "client 9", 9, 0, "train", ("g",), 0.0)
    with pytest.raises(InvalidArgument):
        queue.phases.claim(stolen)


def test_remembered_claim_is_taken_up_by_its_token_and_user() -> None:
    queue = Queue()
    before = Claim("t", "old", "root/j", "client", 1, 5, "train", ("g",), 0.0, inside=True)
    queue.phases.remember(before)
    engine = queue.claim("rollout")
    assert not engine.inside
    with pytest.raises(InvalidArgument):
        queue.phases.claim(Claim("t", "x", "root/j", "client", 1, 6, "train", ("g",), 0.0))
    taken = queue.phases.claim(Claim("t", "new", "root/j", "client", 1, 5, "train", ("g",), 0.0))
    assert taken is before
    assert taken.inside
    assert queue.phases.leave("new", 5, "t")
    queue.phases.advance(0.0)
    assert engine.inside


class Machine(RuleBasedStateMachine):
    """Random claims over a few GPUs: never two phases on one, and nobody waits without a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.claims: list[Claim] = []

    @rule(phase=st.sampled_from(["train", "rollout"]), gpus=st.sets(st.sampled_from("abc"), min_size=1))
    def claim(self, phase: str, gpus: set[str]) -> None:
        self.claims.append(self.queue.claim(phase, *sorted(gpus)))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.claims:
            self.queue.leave(self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1))))

    @invariant()
    def one_phase_a_gpu(self) -> None:
        for _, inside, _ in self.queue.phases.by_gpu():
            assert len({claim.phase for claim in inside}) <= 1

    @invariant()
    def whoever_waits_waits_for_somebody(self) -> None:
        for claim in self.claims:
            assert claim.inside == (not self.queue.phases.blocking(claim))

    @invariant()
    def first_claim_of_all_is_inside(self) -> None:
        assert not self.claims or self.claims[0].inside


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
