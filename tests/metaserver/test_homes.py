"""Which node decides a job's exchanges: the state machine by itself."""

from __future__ import annotations

import pytest

from awexd.tickets import SESSION, key_of
from awexd_transports.errors import DaemonUnavailable, VersionConflict, VersionUnavailable
from tests.metaserver.test_state import JOB, TTL, Cluster


def test_home_is_who_asks_first_and_others_get_leave_to_forward_sessions_there() -> None:
    cluster = Cluster("n0", "n1", "n2")
    assert cluster.state.home("n1", "r1", JOB, 100.0) == ("n1", None)
    assert cluster.state.home("n1", "r1", JOB, 100.0) == ("n1", None)
    for node in ("n0", "n2"):
        home, grant = cluster.state.home(node, "r1", JOB, 100.0)
        assert home == "n1"
        assert grant is not None
        ticket = grant.ticket
        assert (ticket.job, ticket.epoch, ticket.step, ticket.attempt) == (JOB, *SESSION)
        assert (ticket.source, ticket.target, ticket.expires) == ("n1", node, 160_000)
        assert grant.key == key_of(cluster.state.nodes["n1"].key, ticket.encode())
    assert [note.kind for note in cluster.state.notes].count("home") == 1
    assert [JOB in cluster.state.nodes[node].jobs for node in ("n0", "n1", "n2")] == [False, True, False]
    with pytest.raises(VersionUnavailable):
        cluster.state.home("n9", "r1", JOB, 100.0)


def test_home_that_serves_no_others_is_none_for_them() -> None:
    cluster = Cluster("n0")
    cluster.state.announce("alone", "r1", None, "0", 0.0)
    assert cluster.state.home("alone", "r1", JOB, 1.0) == ("alone", None)
    with pytest.raises(VersionUnavailable, match=r"node alone.* serves no other nodes: start its daemon with --listen"):
        cluster.state.home("n0", "r1", JOB, 1.0)


@pytest.mark.parametrize("how", ["left", "lost", "anew", "forgot"])
def test_home_that_is_gone_is_replaced_by_who_asks_next(how: str) -> None:
    cluster = Cluster("n0", "n1")
    cluster.state.home("n0", "r1", JOB, 0.0)
    if how == "left":
        cluster.state.leave("n0", "r1")
    elif how == "lost":
        cluster.state.renew("n1", "r1", TTL)
        cluster.state.expire(TTL)
    elif how == "anew":
        cluster.announce("n0", "r2")
    else:
        cluster.state.forget("n0", "r1", JOB)
    assert cluster.job.home is None
    assert cluster.state.home("n1", "r1", JOB, 1.0) == ("n1", None)


def test_home_tells_a_metaserver_that_was_started_anew_before_another_takes_its_place() -> None:
    old = Cluster("n0", "n1")
    old.report("n0", ranks=2, home=True)
    new = Cluster()
    new.state.restore([old.record()])
    new.announce("n1")
    with pytest.raises(DaemonUnavailable, match="was just started"):
        new.state.home("n1", "r1", JOB, TTL - 1)
    new.announce("n0")
    new.report("n0", ranks=2, home=True)
    home, grant = new.state.home("n1", "r1", JOB, TTL - 1)
    assert (home, grant is not None) == ("n0", True)
    lost = Cluster()
    lost.state.restore([old.record()])
    lost.announce("n1")
    assert lost.state.home("n1", "r1", JOB, TTL) == ("n1", None)
    assert lost.state.home("n1", "r1", "a/another", 0.0) == ("n1", None)  # of which nobody can have been the home


def test_ranks_that_a_former_home_still_tells_of_are_nobodys() -> None:
    cluster = Cluster("n0", "n1")
    cluster.report("n1", ranks=2, home=True)
    assert cluster.job.home == "n1"
    assert cluster.report("n0", ranks=2, home=True) == []
    assert cluster.report("n0", ranks=0, local=True, epoch=1, world_size=2) == []
    assert {member.node for member in cluster.job.members.values()} == {"n1"}
    with pytest.raises(VersionConflict):
        cluster.report("n0", ranks=2)  # a trainer of another kind
