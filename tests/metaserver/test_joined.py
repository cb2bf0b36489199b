"""What the MetaServer is told by nodes that have some of a trainer's ranks each, and what it makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from awexd.metaserver import views
from awexd.metaserver.model import Held, Piece
from awexd_transports.errors import VersionConflict, VersionUnavailable
from tests.metaserver.test_state import JOB, Cluster, joined


def waiting(cluster: Cluster) -> Any:
    return views.view(cluster.job)["waiting"]


def test_ranks_that_wait_are_told_to_the_other_nodes() -> None:
    cluster = Cluster("n0", "n1")
    assert cluster.report("n0") == []
    assert JOB not in cluster.state.jobs
    cluster.report("n0", waiting=frozenset({0, 1}))
    cluster.report("n1", waiting=frozenset({2}))
    assert waiting(cluster) == [{"node": "n0", "ranks": [0, 1]}, {"node": "n1", "ranks": [2]}]
    cluster.report("n1")
    cluster.state.leave("n0", "r1")
    assert waiting(cluster) == []


def test_ranks_of_a_rendezvous_are_told_too_though_their_node_has_joined() -> None:
    cluster = joined()
    cluster.join("n0", 0, epoch="new", incarnation="i2")
    assert waiting(cluster) == [{"node": "n0", "ranks": [0]}]
    cluster.join("n1", 1, epoch="new", incarnation="i2")
    assert waiting(cluster) == []


def test_trainer_that_has_all_its_ranks_on_one_node_is_joined_by_none() -> None:
    cluster = Cluster("n0", "n1")
    cluster.report("n0", (1, 3, 77), ranks=2)
    assert views.view(cluster.job)["local"] == "n0"
    with pytest.raises(VersionConflict, match="its trainer is on node n0"):
        cluster.join("n1", 1)
    assert cluster.join("n1", 1, epoch="new").epoch == 1  # waits for a rank 0 that asks for it as well
    assert cluster.join("n0", 0, epoch="new").epoch == 2
    cluster.report("n0", joined=True)
    assert views.view(cluster.job)["local"] is None
    cluster.commit(1, epoch=2)


def test_ranks_whose_node_began_alone_go_on_together_once_it_has_none() -> None:
    cluster = Cluster("n0", "n1")
    cluster.report("n0", (1, 3, 77), ranks=2)
    cluster.report("n0", waiting=frozenset({0}))
    assert [cluster.join(node, rank).epoch for node, rank in (("n0", 0), ("n1", 1))] == [1, 1]
    assert cluster.job.high == 3
    cluster.commit(4)


def test_node_of_the_trainer_withdraws_for_all_and_a_readers_does_not() -> None:
    cluster = joined()
    attempts = [cluster.commit(step) for step in (3, 4)]
    for node, rank in (("n0", 0), ("n1", 1)):
        held = tuple(
            Held((1, step), attempt, {rank: Piece("d", 100)}) for step, attempt in zip((3, 4), attempts, strict=True)
        )
        assert cluster.report(node, versions=held, joined=True) == []
    cluster.announce("n2")
    cluster.report("n2", withdrawn=frozenset(attempts))
    assert [version.key for version in cluster.job.listed()] == [(1, 4), (1, 3)]
    cluster.report("n1", versions=held[:1], joined=True, withdrawn=frozenset(attempts[1:]))
    assert [version.key for version in cluster.job.listed()] == [(1, 3)]
    assert (cluster.job.high, attempts[1] in cluster.job.aborted) == (4, True)
    with pytest.raises(VersionConflict):
        cluster.begin("n0", 4, 0)


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_job_that_a_node_of_its_trainer_closes_is_over_for_all(node: str) -> None:
    cluster = joined()
    cluster.commit(3)
    for name in ("n0", "n1"):
        cluster.report(name, joined=True)
    cluster.announce("n2")
    cluster.report("n2", waiting=frozenset({1}))
    cluster.state.forget("n2", "r1", JOB)
    assert JOB in cluster.state.jobs
    cluster.state.forget(node, "r1", JOB)
    assert JOB not in cluster.state.jobs


def test_report_that_was_on_its_way_when_a_version_was_committed_costs_it_nothing() -> None:
    cluster = joined()
    attempt = cluster.commit(3)
    cluster.report("n0", joined=True)  # as of before
    assert cluster.job.versions[1, 3].holders == {"n1": {1}}
    held = Held((1, 3), attempt, {0: Piece("d", 100)})
    assert cluster.report("n0", versions=(held,), joined=True) == []
    assert cluster.job.versions[1, 3].held()


def test_step_that_a_rank_has_passed_is_over_whether_it_had_begun_it_or_not() -> None:
    cluster = joined()
    attempt = cluster.begin("n1", 5, 1)
    assert not cluster.seal("n1", 5, attempt, 1)
    cluster.begin("n0", 6, 0)
    assert 5 not in cluster.job.attempts
    assert "rank 0 went on to step 6" in cluster.job.aborted[attempt]
    with pytest.raises(VersionConflict, match="rank 0 went on to step 6 without sealing step 5"):
        cluster.begin("n1", 5, 1)
    cluster.commit(6)


def test_rank_that_has_sealed_a_step_may_be_ahead_of_one_that_has_not() -> None:
    cluster = joined()
    attempt = cluster.begin("n0", 5, 0)
    cluster.seal("n0", 5, attempt, 0)
    cluster.begin("n0", 6, 0)
    assert cluster.begin("n1", 5, 1) == attempt
    assert cluster.seal("n1", 5, attempt, 1)
    cluster.commit(6)


def foretell(cluster: Cluster, node: str, step: int, attempt: int, rank: int, digest: str = "d") -> None:
    cluster.state.foretell(node, "r1", JOB, 1, step, attempt, {rank: Piece(digest, 100)})


def half_foretold(step: int = 1) -> tuple[Cluster, int]:
    """Rank 0 has told what it will seal, rank 1 has begun; a third node reads."""
    cluster = joined()
    cluster.announce("n2")
    attempt = cluster.begin("n0", step, 0)
    cluster.begin("n1", step, 1)
    foretell(cluster, "n0", step, attempt, 0)
    return cluster, attempt


def grants(cluster: Cluster, node: str, step: int, **more: Any) -> dict[str, list[int]]:
    found = cluster.state.tickets(node, "r1", JOB, (1, step), now=0.0, **more)
    return {grant.source.name: sorted(grant.ranks) for grant in found}


def test_what_is_written_is_told_once_all_ranks_have_told_of_it() -> None:
    cluster, attempt = half_foretold()
    assert views.view(cluster.job)["coming"] == []
    with pytest.raises(VersionUnavailable):
        grants(cluster, "n2", 1)
    foretell(cluster, "n1", 1, attempt, 1)
    (row,) = views.view(cluster.job)["coming"]
    assert (row["step"], row["attempt"], row["holders"]) == (1, attempt, {"n0": [0], "n1": [1]})
    assert row["pieces"] == [[0, "d", 100, False], [1, "d", 100, False]]
    assert views.view(cluster.job)["pieces"] == []


def test_who_fetches_what_is_written_goes_on_when_it_is_committed() -> None:
    cluster, attempt = half_foretold()
    foretell(cluster, "n1", 1, attempt, 1)
    cluster.announce("n3")
    assert grants(cluster, "n2", 1) == {"n0": [0], "n1": [1]}
    cluster.report("n2", fetching=frozenset({(1, 1)}))
    assert grants(cluster, "n3", 1) == {"n0": [0], "n1": [1]}
    cluster.report("n3", fetching=frozenset({(1, 1)}))
    cluster.announce("n4")
    assert grants(cluster, "n4", 1) == {"n2": [0, 1]}
    cluster.report("n4", fetching=frozenset({(1, 1)}))
    assert not cluster.seal("n0", 1, attempt, 0)
    assert cluster.seal("n1", 1, attempt, 1)
    (version,) = cluster.job.listed()
    assert (list(version.fetching), dict(version.asked)) == (["n2", "n3", "n4"], {"n0": 200, "n1": 200, "n2": 200})
    assert (cluster.job.coming(), cluster.job.attempts) == ([], {})


def test_node_that_fetches_no_more_serves_nobody_what_is_written() -> None:
    cluster, attempt = half_foretold()
    foretell(cluster, "n1", 1, attempt, 1)
    cluster.announce("n3")
    grants(cluster, "n2", 1)
    cluster.report("n2")
    assert grants(cluster, "n3", 1) == {"n0": [0], "n1": [1]}
    cluster.state.leave("n3", "r1")
    assert list(cluster.job.coming()[0].fetching) == []


def test_rank_that_seals_other_bytes_than_it_told_of_has_them_committed_and_nothing_carried_over() -> None:
    cluster, attempt = half_foretold()
    foretell(cluster, "n1", 1, attempt, 1)
    grants(cluster, "n2", 1)
    cluster.seal("n0", 1, attempt, 0, digest="other")
    assert cluster.seal("n1", 1, attempt, 1)
    (version,) = cluster.job.listed()
    assert (version.pieces[0].digest, list(version.fetching)) == ("other", [])


def test_what_is_told_of_an_attempt_must_be_of_that_nodes_ranks_and_stay_so() -> None:
    cluster, attempt = half_foretold()
    with pytest.raises(VersionConflict, match="is not registered on node n0"):
        foretell(cluster, "n0", 1, attempt, 1)
    with pytest.raises(VersionConflict, match="other bytes"):
        foretell(cluster, "n0", 1, attempt, 0, digest="other")
    foretell(cluster, "n1", 1, attempt + 7, 1)  # over, or of another process: of no use
    foretell(cluster, "n1", 2, attempt, 1)
    assert cluster.job.coming() == []


@pytest.mark.parametrize("end", ["abort", "leave", "anew"])
def test_attempt_that_is_over_is_told_no_more(end: str) -> None:
    cluster, attempt = half_foretold()
    foretell(cluster, "n1", 1, attempt, 1)
    if end == "abort":
        cluster.state.abort("n1", "r1", JOB, 1, 1, attempt, "why")
    elif end == "leave":
        cluster.state.leave("n1", "r1")
    else:
        assert cluster.begin("n1", 1, 1) > attempt  # what others have of the rank must not meet its next bytes
    assert views.view(cluster.job)["coming"] == []
    assert attempt in cluster.job.aborted


def test_trainer_of_one_node_tells_with_its_report_what_it_writes() -> None:
    cluster = Cluster("n0", "n1", "n2")
    pieces = {rank: Piece("d", 100) for rank in range(2)}
    coming = (Held((1, 2), 77, pieces),)
    cluster.report("n0", (1, 1, 76), ranks=2, coming=coming)
    assert grants(cluster, "n1", 2) == {"n0": [0, 1]}
    cluster.report("n1", fetching=frozenset({(1, 2)}))
    cluster.report("n0", (1, 1, 76), (1, 2, 77), ranks=2)
    assert list(cluster.job.versions[1, 2].fetching) == ["n1"]
    cluster.report("n0", (1, 1, 76), (1, 2, 77), ranks=2, coming=(Held((1, 3), 78, pieces),))
    (row,) = views.view(cluster.job)["coming"]
    assert row["step"] == 3
    cluster.report("n0", (1, 1, 76), (1, 2, 77), ranks=2, coming=(Held((1, 3), 79, pieces),))
    (row,) = views.view(cluster.job)["coming"]
    assert row["attempt"] == 79
    cluster.report("n0", (1, 1, 76), (1, 2, 77), ranks=2)
    assert views.view(cluster.job)["coming"] == []
    cluster.report("n0", (1, 1, 76), (1, 2, 77), ranks=2, coming=(Held((1, 3), 80, pieces),))
    cluster.state.leave("n0", "r1")  # which decides: it may commit it all the same
    assert (cluster.job.coming(), dict(cluster.job.aborted)) == ([], {})
