"""Trainers and engines on two GPUs of one node, which read each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.daemons import Daemon, daemon, folder
from tests.e2e.conftest import fork, nursery
from tests.e2e.direct_node import CAPTURED, PUBLISH, UPDATE, expected
from tests.e2e.test_direct import (
    test_case_23_killed_trainer_takes_its_version_along_and_readers_close_its_memory,
    test_killed_trainer_in_the_midst_of_an_update,
    test_nothing_is_left_after_many_deaths,
    test_offload_takes_back_what_is_lent_and_it_is_lent_again_after_restore,
    test_parameters_that_change_before_captured_are_found_by_their_checksums,
    test_staged_then_withdrawn_is_no_success,
    test_two_ranks_to_engines_of_one_and_two_workers,
    test_without_checksums_copies_are_compared_with_their_source,
)
from tests.e2e.workers.processes import Process, together
from tests.gpu.test_direct import GpuNode

__all__ = [
    "daemon",
    "folder",
    "fork",
    "nursery",
    "test_case_23_killed_trainer_takes_its_version_along_and_readers_close_its_memory",
    "test_killed_trainer_in_the_midst_of_an_update",
    "test_nothing_is_left_after_many_deaths",
    "test_offload_takes_back_what_is_lent_and_it_is_lent_again_after_restore",
    "test_parameters_that_change_before_captured_are_found_by_their_checksums",
    "test_staged_then_withdrawn_is_no_success",
    "test_two_ranks_to_engines_of_one_and_two_workers",
    "test_without_checksums_copies_are_compared_with_their_source",
]
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs: run `make test-gpu`")

CONTEXT = 64 << 20
"""Bytes: less than a context takes (529 MiB were measured), more than tables do."""


class PeerNode(GpuNode):
    """Each process is on the next device, by turns."""

    devices: tuple[int, ...] = (0, 1)

    def process(self, uuids: tuple[str, ...], refuse: tuple[str, ...]) -> Process:
        process = super().process(uuids, refuse)
        device, self.devices = self.devices[0], (*self.devices[1:], self.devices[0])
        process.do(f"torch.cuda.set_device({device})")
        return process


@pytest.fixture(params=["WatchedCudaDriver", "ExpandableCudaDriver"])
def node(daemon: Daemon, fork: Callable[[], Process], tmp_path: Path, request: pytest.FixtureRequest) -> PeerNode:
    made = PeerNode(daemon, fork, tmp_path)
    made.driver = request.param
    return made


@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_engine_on_another_gpu_than_the_trainer(node: PeerNode, verify: str) -> None:
    trainer, engine = node.trainer(rows=1000, verify=verify), node.engine(rows=1000, verify=verify)
    for step in (1, 2):
        trainer.do(PUBLISH.format(step))
        found, mode, transport, _, values = engine.do(UPDATE.format(step))
        assert (found, mode, transport) == (step, "direct", "cuda_ipc")
        assert values == expected(step, 1000)
        trainer.do(CAPTURED)


def test_an_engine_takes_no_context_on_the_trainers_gpu(node: PeerNode) -> None:
    trainer, engine = node.trainer(rows=1000), node.engine(rows=1000)
    free = "result = torch.cuda.mem_get_info()[0]"
    trainer.do(PUBLISH.format(1))
    before = trainer.do(free)
    engine.do(UPDATE.format(1))
    assert before - trainer.do(free) < CONTEXT
    trainer.do(CAPTURED)


@pytest.mark.parametrize("mode", ["direct", "host"])
@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_two_ranks_each_on_both_gpus(node: PeerNode, mode: str, verify: str) -> None:
    trainers = [node.trainer(rank, 2, rows=300, mode=mode, verify=verify) for rank in range(2)]
    for trainer in trainers:
        trainer.finish()
    engines = [node.engine(rank, 2, rows=600, verify=verify) for rank in range(2)]
    for step in (1, 2, 3):
        together(trainers, [PUBLISH.format(step)] * 2)
        results = together(engines, [UPDATE.format(None)] * 2)
        assert [result[1] for result in results] == [mode] * 2
        assert [result[-1] for result in results] == [expected(step, 600, slice(at, at + 3)) for at in (0, 3)]
        together(trainers, [CAPTURED] * 2)


def test_auto_lends_to_engines_on_another_gpu_that_wait(node: PeerNode) -> None:
    trainer, engine = node.trainer(mode="auto"), node.engine()
    engine.start(UPDATE.format(1))
    node.await_engine_waits()
    assert trainer.do(PUBLISH.format(1))[0] == "direct"
    assert engine.finish()[-1] == expected(1, 4)
    trainer.do(CAPTURED)
