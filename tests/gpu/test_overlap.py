"""Updates of GPU memory that copy what has come of a version while the rest is on its way; and slices told early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemons import folder
from tests.e2e.conftest import fork, nursery
from tests.e2e.workers.processes import Process
from tests.nodes.clusters import lasting
from tests.nodes.conftest import forks
from tests.nodes.test_overlap_functional import HELD_SECONDS, NBYTES, PUBLISH, UPDATE, gated, reader_on, writer_on

__all__ = ["folder", "fork", "forks", "nursery"]
Forks = Callable[[int], list[Process]]


@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_gpu_takes_what_has_come(folder: Path, forks: Forks, verify: str) -> None:
    with gated(folder) as (cluster, gate):
        trainer = writer_on(cluster["a"], forks(1)[0], verify, "cuda:0")
        reader = reader_on(cluster["b"], forks(1)[0], verify=verify, device="cuda:0")
        reader.start(UPDATE.format(step=1, timeout=60, more=0))
        trainer.do(PUBLISH.format(step=1))
        gate.closed()
        lasting(HELD_SECONDS)
        gate.open()
        step, wrong, pause, _, nbytes = reader.finish()
        assert (step, wrong, nbytes) == (1, [], NBYTES)
        assert pause >= HELD_SECONDS / 2
        for step in range(2, 8):  # by now the trainer writes in slices, and tells of each
            reader.start(UPDATE.format(step=step, timeout=60, more=0))
            trainer.do(PUBLISH.format(step=step))
            assert reader.finish()[:2] == [step, []]
        assert trainer.do("result = any(early for _, early in writer._segment.tables)")
