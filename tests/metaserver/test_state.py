"""The state machine by itself: what is decided, and what must be on disk for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from awexd.metaserver.model import MAX_JOBS_OF_A_NODE, MAX_VERSIONS, Held, Piece, Record, Report
from awexd.metaserver.state import State
from awexd_transports.errors import AwexdError, BudgetExceeded, EpochChanged, VersionConflict, VersionUnavailable

JOB, FIRST, TTL = "a/b", 1000, 10.0


class Cluster:
    """A state and what its nodes would ask of it; ``now`` is its clock."""

    def __init__(self, *nodes: str, first: int = FIRST) -> None:
        self.state = State("run", first, TTL)
        self.now = 0.0
        for node in nodes:
            self.announce(node)

    def announce(self, node: str, run: str = "r1") -> None:
        self.state.announce(node, run, f"{node}:1", "0", self.now)

    def join(self, node: str, *ranks: int, size: int = 2, incarnation: str = "i1", **more: Any) -> Any:
        wanted: dict[str, Any] = {"world_size": size, "keep": 2, "epoch": "continue", "after": None}
        who = {rank: (incarnation, f"digest {rank}") for rank in ranks}
        return self.state.join(node, "r1", JOB, who, **wanted | more)

    def begin(self, node: str, step: int, *ranks: int, epoch: int = 1) -> int:
        return self.state.begin(node, "r1", JOB, epoch, step, ranks).number

    def seal(self, node: str, step: int, attempt: int, *ranks: int, epoch: int = 1, digest: str = "d") -> bool:
        pieces = {rank: Piece(digest, 100) for rank in ranks}
        return self.state.seal(node, "r1", JOB, epoch, step, attempt, pieces)

    def commit(self, step: int, epoch: int = 1) -> int:
        attempt = self.begin("n0", step, 0, epoch=epoch)
        self.begin("n1", step, 1, epoch=epoch)
        assert not self.seal("n0", step, attempt, 0, epoch=epoch)
        assert self.seal("n1", step, attempt, 1, epoch=epoch)
        return attempt

    def report(self, node: str, *versions: tuple[int, int, int], ranks: int = 0, **more: Any) -> Any:
        """Versions as (epoch, step, attempt), of all ``ranks``; local where there are any."""
        pieces = {rank: Piece("d", 100) for rank in range(ranks or 2)}
        held = tuple(Held((epoch, step), attempt, pieces) for epoch, step, attempt in versions)
        wanted: dict[str, Any] = {"local": ranks > 0, "epoch": 1 if ranks else 0, "world_size": ranks, "keep": 2}
        wanted["ranks"] = {rank: f"digest {rank}" for rank in range(ranks)}
        told = Report(**wanted | {"versions": held, "engines": (), "used": frozenset()} | more)
        return self.state.report(node, "r1", JOB, told)

    @property
    def job(self) -> Any:
        return self.state.jobs[JOB]

    def record(self) -> Record:
        return self.state.records[JOB]


def joined() -> Cluster:
    cluster = Cluster("n0", "n1")
    cluster.join("n0", 0)
    cluster.join("n1", 1)
    return cluster


def test_first_rank_opens_epoch_one_and_has_it_written() -> None:
    cluster = Cluster("n0", "n1")
    assert cluster.join("n0", 0).epoch == 1
    assert cluster.record()[1:5] == (1, 2, 2, -1)
    assert cluster.join("n1", 1).absent == []


def test_new_epoch_opens_when_every_rank_has_come_and_only_then() -> None:
    cluster = joined()
    cluster.commit(5)
    attempt = cluster.begin("n0", 6, 0)
    cluster.state.records.clear()
    assert cluster.join("n0", 0, epoch="new", incarnation="i2").epoch == 1
    assert not cluster.state.records
    assert cluster.join("n1", 1, epoch="new", incarnation="i2").epoch == 2
    assert (cluster.record().epoch, cluster.record().high) == (2, -1)
    with pytest.raises(EpochChanged) as failure:
        cluster.seal("n0", 6, attempt, 0)
    assert failure.value.details == {"epoch": 2, "step": None}
    cluster.commit(1, epoch=2)
    assert [version.key for version in cluster.job.listed()] == [(2, 1), (1, 5)]


def test_new_epoch_asked_again_after_a_lost_answer_opens_one_only() -> None:
    cluster = joined()
    cluster.join("n0", 0, epoch="new", incarnation="i2", after=1)
    cluster.join("n1", 1, epoch="new", incarnation="i2", after=1)
    for node, rank in (("n0", 0), ("n1", 1)):
        assert cluster.join(node, rank, epoch="new", incarnation="i2", after=1).epoch == 2


def test_ranks_of_a_new_epoch_must_agree() -> None:
    cluster = joined()
    cluster.join("n0", 0, epoch="new", incarnation="i2")
    with pytest.raises(VersionConflict, match="disagree"):
        cluster.join("n1", 1, epoch="new", incarnation="i2", size=3)


def test_commit_needs_every_rank_and_is_written() -> None:
    cluster = joined()
    attempt = cluster.commit(5)
    assert cluster.record().commits == ((1, 5, attempt, 2),)
    assert cluster.record().high == 5
    version = cluster.job.versions[1, 5]
    assert version.holders == {"n0": {0}, "n1": {1}}
    assert version.held()
    assert cluster.seal("n0", 5, attempt, 0)  # asked again


def test_a_rank_that_is_started_anew_ends_open_attempts() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.begin("n1", 5, 1)
    cluster.seal("n0", 5, attempt, 0)
    cluster.join("n1", 1, incarnation="i2")
    with pytest.raises(VersionConflict, match="rank 1 started anew"):
        cluster.seal("n1", 5, attempt, 1)
    cluster.commit(5)


def test_a_rank_that_only_connects_again_goes_on() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.begin("n1", 5, 1)
    cluster.seal("n0", 5, attempt, 0)
    cluster.state.part("n1", "r1", JOB, [])
    cluster.join("n1", 1, epoch=1)
    assert cluster.seal("n1", 5, attempt, 1)


def test_abort_discards_what_others_have_sealed() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.begin("n1", 5, 1)
    cluster.seal("n0", 5, attempt, 0)
    assert cluster.state.abort("n1", "r1", JOB, 1, 5, attempt, "out of memory")
    with pytest.raises(VersionConflict, match="out of memory"):
        cluster.seal("n1", 5, attempt, 1)
    again = cluster.begin("n1", 5, 1)
    assert again > attempt
    assert not cluster.seal("n1", 5, again, 1)  # rank 0's bytes were of the other attempt
    with pytest.raises(VersionConflict, match="out of memory"):
        cluster.seal("n0", 5, attempt, 0)


def test_a_committed_version_cannot_be_aborted() -> None:
    cluster = joined()
    attempt = cluster.commit(5)
    with pytest.raises(VersionConflict, match="committed"):
        cluster.state.abort("n1", "r1", JOB, 1, 5, attempt, "late")
    assert not cluster.state.abort("n1", "r1", JOB, 1, 5, None, "late")


@pytest.mark.parametrize("step", [0, 4, 5])
def test_steps_go_forward(step: int) -> None:
    cluster = joined()
    cluster.commit(5)
    with pytest.raises(VersionConflict, match="not after step 5"):
        cluster.begin("n0", step, 0)


def test_a_rank_that_went_on_ends_the_step_that_it_left() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.begin("n1", 5, 1)
    cluster.begin("n1", 6, 1)
    with pytest.raises(VersionConflict, match="rank 1 went on to step 6"):
        cluster.seal("n0", 5, attempt, 0)


def test_a_rank_seals_once() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.seal("n0", 5, attempt, 0)
    cluster.seal("n0", 5, attempt, 0)
    with pytest.raises(VersionConflict, match="other bytes"):
        cluster.seal("n0", 5, attempt, 0, digest="e")
    with pytest.raises(VersionConflict, match="has sealed"):
        cluster.begin("n0", 5, 0)


def test_nobody_begins_before_every_rank_is_there() -> None:
    cluster = Cluster("n0", "n1")
    cluster.join("n0", 0)
    with pytest.raises(VersionConflict) as failure:
        cluster.begin("n0", 5, 0)
    assert failure.value.details == {"absent": [1]}


def test_a_node_that_is_gone_takes_its_seals_and_holdings_along() -> None:
    cluster = joined()
    cluster.commit(5)
    attempt = cluster.begin("n0", 6, 0)
    cluster.begin("n1", 6, 1)
    cluster.seal("n1", 6, attempt, 1)
    cluster.now = 9.0
    cluster.state.renew("n0", "r1", cluster.now)
    cluster.state.expire(10.0)
    assert list(cluster.state.nodes) == ["n0"]
    with pytest.raises(VersionConflict, match="node n1 is gone"):
        cluster.seal("n0", 6, attempt, 0)
    assert cluster.job.versions[1, 5].holders == {"n0": {0}}
    assert not cluster.job.versions[1, 5].held()
    assert cluster.job.absent == [1]
    assert cluster.state.next_expiry() == 19.0


def test_a_daemon_that_was_started_anew_takes_its_place() -> None:
    cluster = joined()
    cluster.announce("n1", "r2")
    assert cluster.job.absent == [1]
    with pytest.raises(VersionConflict, match="ended"):
        cluster.begin("n1", 5, 1)
    with pytest.raises(VersionConflict, match="choose another"):
        cluster.state.announce("n1", "r3", "elsewhere:1", "0", cluster.now)


def test_writers_that_left_after_sealing_still_commit() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.begin("n1", 5, 1)
    cluster.seal("n0", 5, attempt, 0)
    cluster.state.part("n0", "r1", JOB, [0])
    assert cluster.seal("n1", 5, attempt, 1)
    assert cluster.job.versions[1, 5].holders == {"n0": {0}, "n1": {1}}


def test_writers_that_left_before_sealing_end_the_attempt() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.begin("n1", 5, 1)
    cluster.state.part("n0", "r1", JOB, [0])
    with pytest.raises(VersionConflict, match="rank 0 left"):
        cluster.seal("n1", 5, attempt, 1)


def test_rolling_back_withdraws_newer_versions_and_their_steps() -> None:
    cluster = joined()
    kept, gone = cluster.commit(5), cluster.commit(6)
    assert cluster.state.roll_back(JOB, 5) == [(1, 6)]
    assert [version.key for version in cluster.job.listed()] == [(1, 5)]
    assert cluster.record().commits == ((1, 5, kept, 2),)
    assert cluster.record().high == 6
    with pytest.raises(VersionConflict):
        cluster.begin("n0", 6, 0)
    assert cluster.report("n0", (1, 6, gone)) == [(1, 6)]
    with pytest.raises(VersionUnavailable, match="epoch 1 step 5"):
        cluster.state.roll_back(JOB, 6)


def test_after_a_restart_epochs_and_commits_are_there_and_nodes_go_on() -> None:
    cluster = joined()
    committed = cluster.commit(5)
    lost = cluster.begin("n0", 6, 0)
    cluster.seal("n0", 6, lost, 0)
    after = Cluster(first=lost + 1)
    after.state.restore([cluster.record()])
    with pytest.raises(VersionUnavailable):
        after.seal("n0", 6, lost, 0)
    for node in ("n0", "n1"):
        after.announce(node)
    after.join("n0", 0, epoch=1)
    after.join("n1", 1, epoch=1)
    assert after.seal("n1", 5, committed, 1)  # its answer was lost
    assert after.report("n0", (1, 5, committed)) == []
    assert after.job.versions[1, 5].held()
    assert not after.seal("n0", 6, lost, 0)
    assert after.seal("n1", 6, lost, 1)
    with pytest.raises(VersionConflict, match="not known here"):
        after.seal("n1", 7, lost + 50, 1)


def test_of_two_attempts_of_a_former_process_the_later_counts() -> None:
    cluster = joined()
    after = Cluster("n0", "n1", first=FIRST + 100)
    after.state.restore([cluster.record()])
    after.join("n0", 0, epoch=1)
    after.join("n1", 1, epoch=1)
    assert not after.seal("n0", 5, FIRST + 1, 0)
    assert not after.seal("n1", 5, FIRST + 2, 1)
    with pytest.raises(VersionConflict, match="came after it"):
        after.seal("n0", 5, FIRST + 1, 0)
    assert after.seal("n0", 5, FIRST + 2, 0)


def test_a_job_of_one_node_is_as_that_node_says() -> None:
    cluster = Cluster("n0", "n1")
    assert cluster.report("n0", (1, 3, 77), (1, 4, 78), ranks=2) == []
    assert (cluster.job.epoch, cluster.job.high) == (1, 4)
    assert cluster.record().commits == ((1, 3, 77, 2), (1, 4, 78, 2))
    assert cluster.report("n1", (1, 4, 78)) == []
    assert cluster.report("n1", (1, 4, 79)) == [(1, 4)]
    with pytest.raises(VersionConflict, match="has writers on node n0"):
        cluster.report("n1", ranks=2)
    cluster.report("n0", (1, 4, 78), ranks=2, epoch=2)
    with pytest.raises(EpochChanged):
        cluster.report("n0", ranks=2)


def test_a_job_of_one_node_that_closes_it_begins_anew() -> None:
    cluster = Cluster("n0", "n1")
    cluster.report("n0", (1, 3, 77), ranks=2)
    cluster.report("n1", (1, 3, 77))
    cluster.state.forget("n1", "r1", JOB)
    assert (cluster.job.epoch, cluster.job.high) == (1, 3)
    cluster.report("n1", (1, 3, 77))
    cluster.state.forget("n0", "r1", JOB)  # others may have copies: it is over there too
    assert cluster.record().closed
    assert cluster.report("n0", (1, 0, 90), ranks=2) == []
    assert (cluster.record().closed, cluster.record().high) == (False, 0)


def test_a_report_that_says_the_same_changes_nothing() -> None:
    cluster = Cluster("n0")
    cluster.report("n0", (1, 3, 77), ranks=1)
    cluster.state.touched.clear()
    cluster.state.records.clear()
    cluster.report("n0", (1, 3, 77), ranks=1)
    assert (cluster.state.touched, cluster.state.records) == (set(), {})


def test_what_nobody_holds_is_no_longer_listed_but_for_the_newest() -> None:
    cluster = Cluster("n0")
    cluster.report("n0", (1, 1, 71), (1, 2, 72), (1, 3, 73), ranks=1)
    cluster.report("n0", (1, 2, 72), ranks=1)
    assert [version.key for version in cluster.job.listed()] == [(1, 3), (1, 2)]


def test_after_a_restart_an_old_epoch_of_another_size_is_whole_only_with_all_of_its_ranks() -> None:
    cluster = joined()
    old = cluster.commit(5)
    cluster.join("n0", 0, epoch="new", size=1, incarnation="i2")
    attempt = cluster.begin("n0", 1, 0, epoch=2)
    cluster.seal("n0", 1, attempt, 0, epoch=2)
    after = Cluster("n0", first=FIRST + 100)
    after.state.restore([cluster.record()])
    pieces = {0: Piece("d", 100)}
    told = Report(False, 0, 0, 0, {}, (Held((1, 5), old, pieces), Held((2, 1), attempt, pieces)), (), frozenset())
    assert after.state.report("n0", "r1", JOB, told) == []
    assert [(version.key, version.held()) for version in after.job.listed()] == [((2, 1), True), ((1, 5), False)]


def test_what_is_remembered_of_a_job_is_bounded() -> None:
    cluster = joined()
    for step in range(2 * MAX_VERSIONS):
        cluster.commit(step)
    assert len(cluster.record().commits) == len(cluster.job.versions) == MAX_VERSIONS
    for step in range(1000):
        cluster.begin("n0", 1000 + step, 0)
    assert len(cluster.job.attempts) == 1
    assert len(cluster.job.aborted) == 256


def test_a_node_has_so_many_jobs_and_no_more() -> None:
    cluster = Cluster("n0")
    told = Report(False, 0, 0, 0, {}, (Held((1, 1), 1, {0: Piece("d", 1)}),), (), frozenset())
    for number in range(MAX_JOBS_OF_A_NODE):
        cluster.state.report("n0", "r1", f"a/{number}", told)
    with pytest.raises(BudgetExceeded):
        cluster.state.report("n0", "r1", "a/another", told)


def test_tickets_name_this_process_and_end() -> None:
    cluster = joined()
    cluster.commit(5)
    (grant,) = cluster.state.tickets("n0", "r1", JOB, (1, 5), ranks=[1], now=100.0)
    ticket = grant.ticket
    assert (ticket.run, ticket.source, ticket.target, ticket.expires) == ("run", "n1", "n0", 160_000)
    assert (grant.source.name, grant.ranks) == ("n1", frozenset({1}))
    assert len(grant.key) == 32


def test_writers_nodes_send_what_an_engines_takes_in_and_then_those_do_that_have_it() -> None:
    cluster = Cluster("n0", "n1", "n2", "n3", "n4")
    cluster.join("n0", 0)
    cluster.join("n1", 1)
    cluster.commit(5)

    def ask(node: str, *ranks: int, **more: Any) -> dict[str, set[int]]:
        found = cluster.state.tickets(node, "r1", JOB, (1, 5), ranks=ranks or None, now=1.0, **more)
        return {grant.source.name: set(grant.ranks) for grant in found}

    assert ask("n2") == ask("n3") == {"n0": {0}, "n1": {1}}  # each half of it, twice
    assert ask("n4") == {"n2": {0, 1}}
    assert ask("n4", 1, avoid=frozenset({"n2", "n3"})) == {"n1": {1}}
    assert ask("n0", 1, avoid=frozenset({"n2", "n3", "n4"})) == {"n1": {1}}  # a trainer's node takes the others' ranks
    with pytest.raises(VersionUnavailable, match="rank 1 of epoch 1 step 5"):
        ask("n0", 1, avoid=frozenset({"n1", "n2", "n3", "n4"}))
    cluster.state.leave("n1", "r1")
    assert ask("n2", 0) == {"n0": {0}}
    with pytest.raises(VersionUnavailable):
        ask("n2")


def test_sources_are_chosen_by_the_bytes_asked_of_them() -> None:
    cluster = Cluster("n0", "n1", "n2")
    cluster.report("n0", (1, 3, 77), ranks=2)
    cluster.report("n1", (1, 3, 77))
    asked = cluster.job.versions[1, 3].asked
    asked |= {"n0": 150, "n1": 100}
    (grant,) = cluster.state.tickets("n2", "r1", JOB, (1, 3), now=1.0)
    assert (grant.source.name, asked["n1"]) == ("n1", 300)


def test_node_that_brings_a_part_serves_only_those_that_bring_the_same() -> None:
    cluster = Cluster("n0", "n1", "n2", "n3", "n4")
    cluster.report("n0", (1, 3, 77), ranks=2)

    def ask(node: str, parts: str | None) -> str:
        (grant,) = cluster.state.tickets(node, "r1", JOB, (1, 3), parts=parts, now=1.0)
        return grant.source.name

    assert [ask("n1", "aa"), ask("n2", "bb"), ask("n3", None)] == ["n0"] * 3
    assert ask("n4", "aa") in ("n1", "n3")
    cluster.job.versions[1, 3].asked["n3"] = 10**6
    assert ask("n4", "aa") == "n1"


def test_node_that_holds_a_part_serves_its_like_and_its_own_ranks_to_all() -> None:
    cluster = Cluster("n0", "n1", "n2", "n3")
    cluster.report("n0", (1, 3, 77), ranks=2)
    pieces = {rank: Piece("d", 100) for rank in range(2)}

    def tell(node: str, parts: str | None, *whole: int) -> None:
        held = Held((1, 3), 77, pieces, parts, frozenset(whole))
        cluster.state.report(node, "r1", JOB, Report(False, 0, 0, 0, {}, (held,), (), frozenset()))

    def ask(parts: str | None, *ranks: int) -> set[str]:
        avoid = frozenset({"n0"})
        found = cluster.state.tickets("n3", "r1", JOB, (1, 3), avoid=avoid, ranks=ranks or None, parts=parts, now=1.0)
        return {grant.source.name for grant in found}

    tell("n1", "aa")
    assert ask("aa") == {"n1"}
    for other in ("bb", None):
        with pytest.raises(VersionUnavailable):
            ask(other)
    tell("n2", "bb", 1)  # rank 1 was written there
    assert ask("bb", 0) == {"n2"}
    assert ask("cc", 1) == {"n2"}
    with pytest.raises(VersionUnavailable):
        ask("cc", 0)
    tell("n1", None)  # the rest has come
    assert ask("cc", 0) == ask(None, 0) == {"n1"}
    assert cluster.job.versions[1, 3].parts == {"n2": "bb"}


def test_who_fetches_is_asked_by_those_that_begin_later_and_by_no_others() -> None:
    cluster = Cluster("n0", "n1", "n2", "n3")
    cluster.report("n0", (1, 3, 77), ranks=2)

    def ask(node: str, **more: Any) -> str:
        (grant,) = cluster.state.tickets(node, "r1", JOB, (1, 3), now=100.0, **more)
        return str(grant.source.name)

    assert [ask(node) for node in ("n1", "n2", "n3")] == ["n0", "n1", "n2"]
    assert ask("n2", avoid=frozenset({"n1"})) == "n0"  # not n3, which may wait for it
    with pytest.raises(VersionUnavailable):
        ask("n1", avoid=frozenset({"n0"}))
    cluster.report("n2", (1, 3, 77))
    assert ask("n1", avoid=frozenset({"n0"})) == "n2"  # it has all of it
    cluster.report("n1")  # it has given up
    assert list(cluster.job.versions[1, 3].fetching) == ["n3"]
    cluster.state.leave("n3", "r1")
    assert not cluster.job.versions[1, 3].fetching


def test_what_the_deciding_node_withdraws_is_withdrawn_for_all() -> None:
    cluster = Cluster("n0", "n1")
    cluster.report("n0", (1, 3, 77), (1, 4, 78), ranks=2)
    cluster.report("n1", (1, 3, 77), (1, 4, 78))
    cluster.report("n1", (1, 3, 77), (1, 4, 78), withdrawn=frozenset({77}))  # it does not decide
    assert [version.key for version in cluster.job.listed()] == [(1, 4), (1, 3)]
    cluster.report("n0", (1, 3, 77), ranks=2, withdrawn=frozenset({78}))
    assert [version.key for version in cluster.job.listed()] == [(1, 3)]
    assert (cluster.job.high, 78 in cluster.job.aborted) == (4, True)
    assert cluster.record().commits == ((1, 3, 77, 2),)
    assert cluster.report("n1", (1, 3, 77), (1, 4, 78)) == [(1, 4)]
    cluster.report("n0", (1, 3, 77), (1, 4, 79), ranks=2)  # that step is used
    assert [version.key for version in cluster.job.listed()] == [(1, 3)]


class Commits(RuleBasedStateMachine):
    """Any order of begins, seals, aborts, new processes and restarts of either side: no version mixes attempts.

    A rank knows what it gave up itself, and never seals it again; of what others gave up it may know nothing.
    """

    begun = Bundle("begun")

    def __init__(self) -> None:
        super().__init__()
        self.cluster = joined()
        self.lives = [1, 1]
        self.given_up: set[tuple[int, int]] = set()
        self.sealed: dict[int, dict[int, str]] = {}
        self.seen: dict[tuple[int, int], int] = {}
        self.position = (1, -1)
        self.disk = self.cluster.record()

    def quietly(self, what: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return what(*arguments, **more)
        except AwexdError:
            return None

    @rule(target=begun, rank=st.integers(0, 1), step=st.integers(0, 6))
    def begin(self, rank: int, step: int) -> tuple[int, ...] | None:
        epoch = self.cluster.job.epoch
        number = self.quietly(self.cluster.begin, f"n{rank}", step, rank, epoch=epoch)
        return (number, epoch, step, rank, self.lives[rank]) if number is not None else None

    @rule(of=begun)
    def seal(self, of: tuple[int, ...] | None) -> None:
        if of is None or of[4] != self.lives[of[3]] or (of[0], of[3]) in self.given_up:
            return
        number, epoch, step, rank, life = of
        what = f"attempt {number} rank {rank} life {life}"
        done = self.quietly(self.cluster.seal, f"n{rank}", step, number, rank, epoch=epoch, digest=what)
        if done is not None:
            assert self.sealed.setdefault(number, {}).setdefault(rank, what) == what

    @rule(of=begun)
    def abort(self, of: tuple[int, ...] | None) -> None:
        if of is not None and of[4] == self.lives[of[3]]:
            number, epoch, step, rank, _ = of
            done = self.quietly(self.cluster.state.abort, f"n{rank}", "r1", JOB, epoch, step, number, "why")
            if done is not None:
                self.given_up.add((number, rank))

    @rule(rank=st.integers(0, 1))
    def start_anew(self, rank: int) -> None:
        self.lives[rank] += 1
        self.cluster.join(f"n{rank}", rank, incarnation=f"i{self.lives[rank]}")

    @rule()
    def open_epoch(self) -> None:
        for rank in (0, 1):
            self.lives[rank] += 1
            self.cluster.join(f"n{rank}", rank, epoch="new", incarnation=f"i{self.lives[rank]}")

    @rule()
    def restart(self) -> None:
        """The MetaServer's process; the nodes announce themselves again."""
        self.disk = self.cluster.state.records.get(JOB, self.disk)
        job = self.cluster.job
        self.cluster = Cluster("n0", "n1", first=self.cluster.state._next_attempt)
        self.cluster.state.restore([self.disk])
        for rank in (0, 1):
            self.cluster.join(f"n{rank}", rank, epoch=job.epoch, incarnation=f"i{self.lives[rank]}")

    @invariant()
    def only_goes_forward(self) -> None:
        position = (self.cluster.job.epoch, self.cluster.job.high)
        assert position >= self.position
        self.position = position

    @invariant()
    def versions_are_whole_and_of_one_attempt(self) -> None:
        job = self.cluster.job
        for key, version in job.versions.items():
            assert self.seen.setdefault(key, version.attempt) == version.attempt
            assert not {(version.attempt, rank) for rank in (0, 1)} & self.given_up
            for rank, piece in version.pieces.items():
                assert piece.digest == self.sealed[version.attempt][rank]
        for key, (number, _) in job.committed.items():
            assert set(self.sealed[number]) == {0, 1}, key


Commits.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCommits = Commits.TestCase
