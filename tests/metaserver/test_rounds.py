"""Rounds of engines that span nodes, without sockets: what stores and the MetaServer's state decide between them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from awexd.store.ledger import Session
from awexd.store.store import Resolved
from awexd_transports.errors import BudgetExceeded
from tests.metaserver.rounds_cluster import Cluster


def spread(*places: str) -> Cluster:
    """An engine of one worker a place, all of which run on step 1."""
    cluster = Cluster(*sorted(set(places)), size=len(places))
    for rank, place in enumerate(places):
        cluster.worker(rank, place)
    cluster.publish()
    update(cluster, 1)
    return cluster


def update(cluster: Cluster, step: int | None) -> None:
    for worker in cluster.workers.values():
        worker.ask(step)
    cluster.settle()
    for worker in cluster.workers.values():
        assert worker.staged is not None, (worker.rank, worker.error, worker.asked and worker.waits_for())
        worker.apply()
    cluster.settle()


def versions(cluster: Cluster) -> list[Any]:
    return [worker.version for worker in cluster.workers.values()]


def test_all_get_one_version_and_the_round_is_over() -> None:
    cluster = spread("a", "b", "b")
    cluster.publish()
    cluster.settle()
    update(cluster, None)
    assert versions(cluster) == [(1, 2)] * 3
    engine = cluster.state.jobs["me/j"].engines["e"]
    assert (engine.rounds, engine.completed) == ({}, (1, 2))
    for node in cluster.nodes.values():
        assert not node.job.engines["e"].rounds
        assert not any(lease.spans for lease in node.store.leases.values())


def test_nothing_is_handed_out_before_every_node_has_it() -> None:
    cluster = spread("a", "b")
    cluster.publish()
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    first, second = cluster.workers.values()
    for node in (a, b):
        node.learn()
    a.bring(2)
    first.ask(2)
    for _ in range(3):
        for node in (a, b):
            node.exchange()
    assert first.staged is None
    assert "node b (rank 1) to have epoch 1 step 2 for update 1 of engine e" in first.waits_for()
    b.bring(2)
    for node in (b, a):
        node.exchange()
    assert first.staged is not None
    second.ask()  # whatever is newer meanwhile
    assert second.staged is not None
    assert second.staged.version.key == (1, 2)


def test_node_that_cannot_have_it_fails_it_for_all_by_name() -> None:
    cluster = spread("a", "b")
    cluster.publish()
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    for node in (a, b):
        node.learn()
    a.bring(2)
    first, second = cluster.workers.values()
    first.ask(2)
    second.ask(2)
    a.exchange()
    assert b.job.mirror is not None
    b.job.mirror.failed[1, 2] = BudgetExceeded("no room")
    for _ in range(3):
        for node in (b, a):
            node.exchange()
    for worker in (first, second):
        worker.look()
        assert worker.error is not None
        assert worker.error.code == "budget_exceeded"
    assert "node b (rank 1) cannot have it: no room" in str(first.error)
    assert versions(cluster) == [(1, 1)] * 2
    b.job.mirror.failed.clear()
    update(cluster, 2)
    assert versions(cluster) == [(1, 2)] * 2


def test_node_that_is_lost_fails_what_was_not_settled() -> None:
    cluster = spread("a", "b")
    cluster.publish()
    first = cluster.workers[0]
    a = cluster.nodes["a"]
    a.learn()
    a.bring(2)
    first.ask(2)
    a.exchange()
    cluster.lose("b")
    a.exchange()
    assert first.error is not None
    assert "rank 1: node b is gone" in str(first.error)
    cluster.now += 1.0
    update(cluster, 2)  # it is back


def test_settled_round_outlives_the_metaserver_though_a_newer_version_is_asked_for() -> None:
    cluster = spread("a", "b")
    cluster.publish()
    for worker in cluster.workers.values():
        worker.ask(2)
    cluster.settle()
    first, second = cluster.workers.values()
    first.apply()
    second.give_up()
    cluster.publish()
    cluster.begin()
    second.ask(None)
    cluster.settle()
    assert second.staged is not None
    assert second.staged.version.key == (1, 2)
    second.apply()
    cluster.settle()
    assert cluster.state.jobs["me/j"].engines["e"].rounds == {}


def test_round_that_nobody_got_anything_in_may_be_of_another_version() -> None:
    cluster = spread("a", "b")
    cluster.publish()
    for worker in cluster.workers.values():
        worker.ask(2)
    cluster.settle()
    for worker in cluster.workers.values():
        worker.give_up()
    cluster.publish()
    cluster.settle()
    update(cluster, 3)
    assert [worker.updates for worker in cluster.workers.values()] == [2, 2]


def test_one_that_somebody_has_got_may_not_and_is_skipped_by_number() -> None:
    cluster = spread("a", "b")
    cluster.publish()
    for worker in cluster.workers.values():
        worker.ask(2)
    cluster.settle()
    first, second = cluster.workers.values()
    first.apply()
    second.give_up(dirty=True)
    cluster.publish()
    update(cluster, 3)
    assert versions(cluster) == [(1, 3)] * 2
    cluster.check()


def test_worker_that_is_replaced_on_another_node_joins_the_open_round() -> None:
    cluster = Cluster("a", "b", "c", size=2)
    for rank, place in enumerate("ab"):
        cluster.worker(rank, place)
    for _ in range(2):
        cluster.publish()
    update(cluster, 1)
    for worker in cluster.workers.values():
        worker.ask(2)
    cluster.settle()
    first, second = cluster.workers.values()
    first.apply()
    second.die()
    cluster.settle()
    cluster.publish()
    successor = cluster.worker(1, "c")
    successor.ask(None)
    cluster.settle()
    assert successor.staged is not None
    assert successor.staged.version.key == (1, 2)


def test_version_older_than_a_node_keeps_is_kept_there_for_its_round() -> None:
    cluster = spread("a", "b")
    cluster.publish()
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    for node in (a, b):
        node.learn()
    a.bring(2)
    cluster.workers[0].ask(2)
    for _ in range(2):
        cluster.publish()
    for node in (a, b):
        node.learn()
        for step in (3, 4):
            node.bring(step)
    assert [version.key for version in b.job.held()] == [(1, 4), (1, 3)]
    cluster.settle()
    assert cluster.workers[0].staged is not None
    assert [version.key for version in b.job.held()] == [(1, 4), (1, 3), (1, 2)]
    update(cluster, 2)
    update(cluster, 4)
    assert [version.key for version in b.job.held()] == [(1, 4), (1, 3)]


def test_rank_that_another_node_has_is_refused() -> None:
    cluster = spread("a", "b", "c")
    stray = cluster.workers[0]
    cluster.worker(0, "b")
    node = cluster.nodes["b"]
    node.send()
    node.deliver()
    assert node.answer is None  # refused, and told so
    assert stray.version == (1, 1)


def test_engine_whose_workers_all_are_here_asks_nobody() -> None:
    cluster = Cluster("a", size=2)
    cluster.publish()
    node = cluster.nodes["a"]
    node.bring(1)
    for rank in range(2):
        cluster.worker(rank, "a")
    cluster.workers[1].die()  # also while one of them is being replaced
    cluster.workers[0].ask()
    assert cluster.workers[0].staged is not None
    assert node.facts is None


def test_such_an_engine_asks_nobody_after_a_restart_of_its_daemon_either() -> None:
    cluster = Cluster("a", size=2)
    cluster.publish()
    node = cluster.nodes["a"]
    node.bring(1)
    session = Session("s", 1, 1)
    node.store.open_session(session)
    node.store.register_worker(session, node.job, "e", 0, world_size=2, digest="d", alone=True)
    assert isinstance(node.store.resolve(session, None, 10.0, False, cluster.now), Resolved)


class Chaos(RuleBasedStateMachine):
    """Workers, daemons and the MetaServer come, go and are heard in any order."""

    NODES = ("a", "b", "c")
    node = st.sampled_from(NODES)
    rank = st.integers(0, 2)

    @initialize()
    def begin(self) -> None:
        self.cluster = Cluster(*self.NODES, size=3)
        for rank, node in enumerate(self.NODES):
            self.cluster.worker(rank, node)
        self.cluster.publish()

    @rule(node=node, much=st.integers(1, 3))
    def exchange(self, node: str, much: int) -> None:
        found = self.cluster.nodes[node]
        for step in (found.send, found.deliver, found.hear)[:much]:
            step()

    @rule(node=node)
    def deliver(self, node: str) -> None:
        self.cluster.nodes[node].deliver()

    @rule(node=node)
    def hear(self, node: str) -> None:
        self.cluster.nodes[node].hear()

    @rule()
    def all_exchange(self) -> None:
        for node in self.cluster.nodes.values():
            node.learn()
            for step in self.cluster.commits:
                node.bring(step)
        for _ in range(2):
            for node in self.cluster.nodes.values():
                node.exchange()

    @rule(rank=rank, back=st.sampled_from([None, 0, 1]))
    def ask(self, rank: int, back: int | None) -> None:
        worker = self.cluster.workers[rank]
        if worker.staged is None:
            steps = sorted(self.cluster.commits)
            worker.ask(None if back is None else steps[-1 - min(back, len(steps) - 1)])

    @rule()
    def all_ask(self) -> None:
        for rank in range(3):
            self.ask(rank, None)

    @rule(rank=rank)
    def look(self, rank: int) -> None:
        self.cluster.workers[rank].look()

    @rule(rank=rank)
    def apply(self, rank: int) -> None:
        self.cluster.workers[rank].apply()

    @rule(rank=rank, dirty=st.booleans())
    def give_up(self, rank: int, dirty: bool) -> None:
        self.cluster.workers[rank].give_up(dirty=dirty)

    @rule(node=node)
    def learn(self, node: str) -> None:
        self.cluster.nodes[node].learn()

    @rule(node=node)
    def bring(self, node: str) -> None:
        self.cluster.nodes[node].bring(max(self.cluster.commits))

    @rule()
    def publish(self) -> None:
        self.cluster.publish()

    @rule()
    def roll_back(self) -> None:
        self.cluster.roll_back()

    @rule(rank=rank, node=node)
    def replace(self, rank: int, node: str) -> None:
        self.cluster.workers[rank].die()
        self.cluster.worker(rank, node)

    @rule(node=node)
    def restart(self, node: str) -> None:
        self.cluster.nodes[node].start()
        self.cluster.state.announce(node, self.cluster.nodes[node].run, f"{node}:1", "0", self.cluster.now)

    @rule(node=node)
    def lose(self, node: str) -> None:
        self.cluster.lose(node)

    @rule()
    def restart_metaserver(self) -> None:
        self.cluster.begin()
        for node in self.cluster.nodes.values():
            node.facts = node.answer = None

    @rule(seconds=st.sampled_from([0.001, 50.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        self.cluster.now += seconds
        for node in self.cluster.nodes.values():
            node.store.expire(self.cluster.now)

    @invariant()
    def one_version_a_round(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        """Once all are there and are heard, an update succeeds for all, within a few tries."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for worker in cluster.workers.values():
            worker.give_up()
            worker.asked = None
        step = cluster.publish()
        for number in range(12):
            if number == 6:
                self.pass_time(101.0)  # a round that somebody has left holds its version, and so a slot, for an update
            behind = [worker for worker in cluster.workers.values() if worker.version != (1, step)]
            if not behind:
                break
            for worker in behind:
                if worker.asked is None:
                    conflict = worker.error is not None and worker.error.code == "version_conflict"
                    worker.ask(None if conflict else step)
            cluster.settle()
            for worker in behind:
                worker.look()
                worker.apply()
            cluster.settle()
            cluster.check()
        else:
            stuck = [(one.rank, one.version, one.error, one.asked and one.waits_for()) for one in behind]
            raise AssertionError(stuck)


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
