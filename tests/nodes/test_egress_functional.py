"""However many nodes fetch at once, the trainer's serves little more than one of them; and nodes that come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workers.processes import Process
from tests.nodes.clusters import Cluster
from tests.nodes.large import PUBLISH, UPDATE, reader_on, writer_on

Forks = Callable[[int], list[Process]]
ELEMENTS = 8 << 20


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_trainers_node_sends_twice_the_model_at_most(folder: Path, forks: Forks, count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    with Cluster(folder, "a", *names) as cluster:
        trainer = writer_on(cluster["a"], forks(1)[0], ELEMENTS)
        engines = [reader_on(cluster[name], forks(1)[0], name, ELEMENTS) for name in names]
        for step in range(1, 4):
            before = cluster["a"].ask("status")["metaserver"]["sent_bytes"]
            for engine in engines:
                engine.start(UPDATE.format(step=step))
            trainer.do(PUBLISH.format(step=step))
            for engine in engines:
                assert engine.finish() == [step, [step]]
            sent = cluster["a"].ask("status")["metaserver"]["sent_bytes"] - before
            assert ELEMENTS * 4 <= sent <= 2 * (ELEMENTS * 4 + (1 << 20)), (step, sent / (ELEMENTS * 4))


def test_nodes_join_and_leave_and_the_others_do_not_notice(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c", ttl=3.0) as cluster:
        trainer = writer_on(cluster["a"], forks(1)[0], ELEMENTS)
        stays = reader_on(cluster["b"], forks(1)[0], "stays", ELEMENTS)
        for step in range(1, 13):
            comes = forks(1)[0]
            if step % 2:
                comes = reader_on(cluster["c"], comes, "comes", ELEMENTS)
            trainer.start(PUBLISH.format(step=step))
            stays.start(UPDATE.format(step=step))
            if step % 2:
                comes.start(UPDATE.format(step=step))
            if step % 4 == 3:
                cluster["c"].kill()
                cluster["c"].start()
            elif step % 4 == 1:
                comes.kill()
            trainer.finish()
            assert stays.finish() == [step, [step]]
            if step % 2 and step % 4 == 3:
                assert comes.finish() == [step, [step]]
                comes.do("reader.close()")


def test_node_that_joins_late_has_the_version_before_it_is_ready(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer = writer_on(cluster["a"], forks(1)[0], ELEMENTS)
        first = reader_on(cluster["b"], forks(1)[0], "first", ELEMENTS)
        for step in (1, 2):
            trainer.do(PUBLISH.format(step=step))
            assert first.do(UPDATE.format(step=step)) == [step, [step]]
        cluster.add("c")
        late = reader_on(cluster["c"], forks(1)[0], "late", ELEMENTS)
        assert late.do("result = [reader.state, reader.version]") == ["empty", None]
        done = late.do("done = reader.update(timeout=60)\nresult = [done.step, seen(), reader.state]")
        assert done == [2, [2], "ready"]
