"""Weights lent in place on a real GPU: the tests of ``tests/e2e/test_direct.py``, and what only CUDA can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemons import Daemon, daemon, folder
from tests.e2e.conftest import fork, nursery
from tests.e2e.direct_node import CAPTURED, PUBLISH, UPDATE, Node, expected
from tests.e2e.test_direct import (
    test_an_update_after_the_version_was_taken_back_waits_for_the_next,
    test_auto_lends_where_every_engine_waits_and_else_copies,
    test_captured_does_not_wait_for_an_engine_that_is_gone,
    test_captured_waits_for_every_engine_and_names_the_late_one,
    test_case_23_killed_trainer_takes_its_version_along_and_readers_close_its_memory,
    test_case_30_31_virtual_memory_is_handed_over_piece_by_piece,
    test_case_30_memory_without_a_handle,
    test_casts_and_host_tensors_cannot_be_lent,
    test_daemon_killed_between_publish_and_captured,
    test_engine_that_is_driven_through_its_own_calls,
    test_engine_that_waits_for_the_next_version_gives_the_memory_back,
    test_hung_reader_holds_the_trainer_up_to_its_lease_and_does_not_report_success,
    test_killed_trainer_in_the_midst_of_an_update,
    test_memory_that_was_given_back_between_steps_is_not_read,
    test_no_engine_at_all_is_named_too,
    test_nothing_is_left_after_many_deaths,
    test_offload_takes_back_what_is_lent_and_it_is_lent_again_after_restore,
    test_other_tensors_are_declared_anew_and_the_old_ones_closed,
    test_owner_of_virtual_memory_dies_before_it_hands_it_over,
    test_parameters_that_change_before_captured_are_found_by_their_checksums,
    test_reader_that_cannot_open_it_says_so_untouched,
    test_rollback_goes_to_held_versions_only,
    test_staged_then_withdrawn_is_no_success,
    test_tensor_turned_in_place_is_never_read_as_it_was,
    test_tensors_rebound_between_steps_are_lent_where_they_are,
    test_tensors_whose_memory_was_given_back_before_they_were_ever_lent,
    test_the_next_step_withdraws_what_nobody_took,
    test_trainer_and_engine_in_one_process,
    test_two_ranks_to_engines_of_one_and_two_workers,
    test_versions_are_read_where_they_lie_and_no_host_memory_is_reserved,
    test_what_cannot_be_closed_is_not_let_go,
    test_withdraw_does_not_wait_for_engines_that_have_not_begun,
    test_without_checksums_copies_are_compared_with_their_source,
)
from tests.e2e.workers.processes import Process

__all__ = [
    "daemon",
    "folder",
    "fork",
    "nursery",
    "test_an_update_after_the_version_was_taken_back_waits_for_the_next",
    "test_auto_lends_where_every_engine_waits_and_else_copies",
    "test_captured_does_not_wait_for_an_engine_that_is_gone",
    "test_captured_waits_for_every_engine_and_names_the_late_one",
    "test_case_23_killed_trainer_takes_its_version_along_and_readers_close_its_memory",
    "test_case_30_31_virtual_memory_is_handed_over_piece_by_piece",
    "test_case_30_memory_without_a_handle",
    "test_casts_and_host_tensors_cannot_be_lent",
    "test_daemon_killed_between_publish_and_captured",
    "test_engine_that_is_driven_through_its_own_calls",
    "test_engine_that_waits_for_the_next_version_gives_the_memory_back",
    "test_hung_reader_holds_the_trainer_up_to_its_lease_and_does_not_report_success",
    "test_killed_trainer_in_the_midst_of_an_update",
    "test_memory_that_was_given_back_between_steps_is_not_read",
    "test_no_engine_at_all_is_named_too",
    "test_nothing_is_left_after_many_deaths",
    "test_offload_takes_back_what_is_lent_and_it_is_lent_again_after_restore",
    "test_other_tensors_are_declared_anew_and_the_old_ones_closed",
    "test_owner_of_virtual_memory_dies_before_it_hands_it_over",
    "test_parameters_that_change_before_captured_are_found_by_their_checksums",
    "test_reader_that_cannot_open_it_says_so_untouched",
    "test_rollback_goes_to_held_versions_only",
    "test_staged_then_withdrawn_is_no_success",
    "test_tensor_turned_in_place_is_never_read_as_it_was",
    "test_tensors_rebound_between_steps_are_lent_where_they_are",
    "test_tensors_whose_memory_was_given_back_before_they_were_ever_lent",
    "test_the_next_step_withdraws_what_nobody_took",
    "test_trainer_and_engine_in_one_process",
    "test_two_ranks_to_engines_of_one_and_two_workers",
    "test_versions_are_read_where_they_lie_and_no_host_memory_is_reserved",
    "test_what_cannot_be_closed_is_not_let_go",
    "test_withdraw_does_not_wait_for_engines_that_have_not_begun",
    "test_without_checksums_copies_are_compared_with_their_source",
]


class GpuNode(Node):
    driver = "WatchedCudaDriver"


@pytest.fixture
def node(daemon: Daemon, fork: Callable[[], Process], tmp_path: Path) -> Node:
    return GpuNode(daemon, fork, tmp_path)


@pytest.fixture
def virtual(node: Node) -> Node:
    node.driver = "ExpandableCudaDriver"
    return node


BIG = """
big = torch.arange(64 << 20, device="cuda", dtype=torch.float32)
writer.register({"big": big})
"""
BIG_ENGINE = """
into = torch.zeros(64 << 20, device="cuda", dtype=torch.float32)
reader.register({"big": into})
"""


def test_memory_of_a_killed_trainer_goes_back_to_the_gpu(node: Node) -> None:
    free = "result = torch.cuda.mem_get_info()[0]"
    trainer, engine = node.trainer(), node.engine()
    trainer.do(BIG)
    engine.do(BIG_ENGINE)
    trainer.do("publication = writer.publish(1)")
    engine.do("reader.update(timeout=20)")
    assert engine.do("result = bool((into == torch.arange(64 << 20, device='cuda', dtype=torch.float32)).all())")
    with_both = engine.do(free)
    trainer.kill()
    engine.do(f"import time; wanted = {with_both + (256 << 20)}; end = time.monotonic() + 20")
    engine.do("while torch.cuda.mem_get_info()[0] < wanted and time.monotonic() < end: time.sleep(0.01)")
    assert engine.do(free) >= with_both + (256 << 20)


def test_many_updates_leave_nothing(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    count = (
        "import os; result = "
        "[torch.cuda.mem_get_info()[0], len(os.listdir('/proc/self/fd')), torch.cuda.memory_allocated()]"
    )
    before = []
    for step in range(1, 31):
        trainer.do(PUBLISH.format(step))
        engine.do(UPDATE.format(None))
        trainer.do(CAPTURED)
        if step == 10:
            before = [trainer.do(count), engine.do(count)]
    assert [trainer.do(count), engine.do(count)] == before
    assert engine.do("result = into['a'].tolist()") == expected(30, 4)
