"""Weights lent in place: real processes, a real daemon, and memory that they share as GPUs' is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.attacks.raw import until
from tests.daemons import Daemon
from tests.e2e.direct_node import CAPTURED, CREW, ENGINE, PUBLISH, TRAINER, UPDATE, Fork, Node, expected
from tests.e2e.workers.processes import RemoteError, together


@pytest.fixture
def node(daemon: Daemon, fork: Fork, tmp_path: Path) -> Node:
    return Node(daemon, fork, tmp_path)


def test_offload_takes_back_what_is_lent_and_it_is_lent_again_after_restore(node: Node) -> None:
    """Memory of its own here: the stand-in's could not be let go."""
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    trainer.do("other = torch.arange(5.0); writer.park('optimizer', {'m': other})")
    engine.do("import time; end = time.monotonic() + 20\nwhile gpu.opened and time.monotonic() < end: time.sleep(0.01)")
    assert engine.do("result = len(gpu.opened)") == 0
    assert node.job()["borrowed"] == []
    trainer.do("writer.restore('optimizer'); assert other.tolist() == [0, 1, 2, 3, 4]")
    trainer.do(PUBLISH.format(2))
    assert engine.do(UPDATE.format(None))[-1] == expected(2, 4)


def test_what_cannot_be_closed_is_not_let_go(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    trainer.do(CAPTURED)
    engine.stop()
    with pytest.raises(RemoteError, match="to close rank 0's memory") as caught:
        trainer.do("other = torch.arange(5.0); writer.park('optimizer', {'m': other}, timeout=0.5)")
    assert caught.value.kind == "DeadlineExceeded"
    trainer.do("assert other.tolist() == [0, 1, 2, 3, 4]")
    engine.resume()
    trainer.do("writer.park('optimizer', {'m': other}); assert other.untyped_storage().nbytes() == 0")


def test_engine_that_waits_for_the_next_version_gives_the_memory_back(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    trainer.do(CAPTURED)
    engine.start(UPDATE.format(2))
    node.await_engine_waits()
    trainer.do("other = torch.arange(5.0); writer.park('optimizer', {'m': other}, timeout=10)")
    trainer.do("writer.restore('optimizer')")
    trainer.do(PUBLISH.format(2))
    assert engine.finish()[-1] == expected(2, 4)


@pytest.fixture
def virtual(node: Node) -> Node:
    """The trainer's memory has no handle."""
    node.driver = "VirtualMemoryDriver"
    return node


def test_versions_are_read_where_they_lie_and_no_host_memory_is_reserved(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    for step in range(1, 6):
        assert trainer.do(PUBLISH.format(step)) == ["direct", ""]
        assert node.job()["borrowed"] == [[1, step]]
        assert node.job()["held"] == []
        assert engine.do(UPDATE.format(step)) == [step, "direct", "cuda_ipc", 'mode="direct"', expected(step, 4)]
        trainer.do(CAPTURED)
        assert node.job()["borrowed"] == []
    assert node.job()["bytes"] == 0
    assert node.daemon.segments() == []
    # opened once, and still open
    assert engine.do("result = len(gpu.opened)") == 1
    (worker,) = node.job()["engines"][0]["workers"]
    assert (worker["version"], worker["result"]["borrowed"]) == ([1, 5], True)


def test_two_ranks_to_engines_of_one_and_two_workers(node: Node) -> None:
    trainers = [node.trainer(rank, 2, rows=3) for rank in range(2)]
    for trainer in trainers:
        trainer.finish()
    engines = [node.engine(rows=6, name="one"), *(node.engine(rank, 2, rows=6, name="two") for rank in range(2))]
    for step in (1, 2):
        together(trainers, [PUBLISH.format(step)] * 2)
        results = together(engines, [UPDATE.format(None)] * 3)
        wanted = [expected(step, 6), expected(step, 6, slice(0, 3)), expected(step, 6, slice(3, 6))]
        assert [result[-1] for result in results] == wanted
        together(trainers, [CAPTURED] * 2)


def test_captured_waits_for_every_engine_and_names_the_late_one(node: Node) -> None:
    trainer, first, second = node.trainer(), node.engine(name="first"), node.engine(name="second")
    trainer.do(PUBLISH.format(1))
    first.do(UPDATE.format(None))
    with pytest.raises(RemoteError, match=r"rank 0 of engine second to update to step 1") as caught:
        trainer.do("publication.captured(timeout=0.3)")
    assert caught.value.kind == "DeadlineExceeded"
    assert node.job()["borrowed"] == [[1, 1]]
    trainer.start(CAPTURED)
    second.do(UPDATE.format(None))
    trainer.finish()


def test_no_engine_at_all_is_named_too(node: Node) -> None:
    trainer = node.trainer()
    trainer.do(PUBLISH.format(1))
    with pytest.raises(RemoteError, match="an engine on this node's GPUs"):
        trainer.do("publication.captured(timeout=0.2)")
    engine = node.engine()
    trainer.start(CAPTURED)
    assert engine.do(UPDATE.format(None))[0] == 1
    trainer.finish()


def test_an_update_after_the_version_was_taken_back_waits_for_the_next(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    trainer.do(CAPTURED)
    with pytest.raises(RemoteError, match="step 1 is not held any more"):
        engine.do(UPDATE.format(1))
    engine.start(UPDATE.format(None))
    trainer.do(PUBLISH.format(2))
    assert engine.finish()[0] == 2
    trainer.do(CAPTURED)


def test_the_next_step_withdraws_what_nobody_took(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    trainer.do(PUBLISH.format(2))
    assert node.job()["borrowed"] == [[1, 2]]
    assert engine.do(UPDATE.format(None))[0] == 2
    trainer.do(CAPTURED)


def test_withdraw_does_not_wait_for_engines_that_have_not_begun(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    trainer.do("publication.withdraw(timeout=5)")
    assert node.job()["borrowed"] == []
    engine.start(UPDATE.format(None))
    trainer.do(PUBLISH.format(2))
    assert engine.finish()[-1] == expected(2, 4)


def test_staged_then_withdrawn_is_no_success(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do("staged = reader.stage(timeout=20)")
    with pytest.raises(RemoteError, match="in the middle of epoch 1 step 1"):
        trainer.do("publication.withdraw(timeout=0.3)")
    with pytest.raises(RemoteError, match="taken back"):
        engine.do("reader.apply(staged)")
    assert engine.do("result = [reader.state, float(into['a'].sum())]") == ["empty", 0.0]
    trainer.do("publication.withdraw(timeout=20)")
    trainer.do(PUBLISH.format(2))
    assert engine.do(UPDATE.format(None))[0] == 2


def test_case_23_killed_trainer_takes_its_version_along_and_readers_close_its_memory(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    trainer.kill()
    until(node.daemon.socket, lambda status: status["jobs"][0]["borrowed"] == [])
    # idle, it asked for nothing: it was told
    engine.do("import time; end = time.monotonic() + 20\nwhile gpu.opened and time.monotonic() < end: time.sleep(0.01)")
    assert engine.do("result = [len(gpu.opened), reader.state, list(reader.version)]") == [0, "ready", [1, 1]]
    with pytest.raises(RemoteError, match="is not held any more"):
        engine.do(UPDATE.format(1))


def test_killed_trainer_in_the_midst_of_an_update(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do("staged = reader.stage(timeout=20)")
    trainer.kill()
    until(node.daemon.socket, lambda status: status["jobs"][0]["writers"] == [])
    with pytest.raises(RemoteError, match=r"taken back|went with its connection"):
        engine.do("reader.apply(staged)")
    assert engine.do("result = reader.state") == "empty"
    trainer = node.trainer()
    trainer.do(PUBLISH.format(2))
    assert engine.do(UPDATE.format(None))[-1] == expected(1, 4)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_captured_does_not_wait_for_an_engine_that_is_gone(node: Node, how: str) -> None:
    trainer, engine, other = node.trainer(), node.engine(name="gone"), node.engine(name="left")
    trainer.do(PUBLISH.format(1))
    other.do(UPDATE.format(None))
    trainer.start(CAPTURED)
    if how == "killed":
        engine.kill()
    else:
        engine.do("reader.close()")
    trainer.finish()


def test_hung_reader_holds_the_trainer_up_to_its_lease_and_does_not_report_success(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do("staged = reader.stage(timeout=1)")
    engine.stop()
    trainer.do("publication.withdraw(timeout=20)")
    engine.resume()
    with pytest.raises(RemoteError, match="taken back"):
        engine.do("reader.apply(staged)")
    assert engine.do("result = reader.version") is None


def test_other_tensors_are_declared_anew_and_the_old_ones_closed(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    trainer.do(CAPTURED)
    trainer.do("old = dict(live); live = gpu.tensors(live); register(live)")
    trainer.do(PUBLISH.format(2))
    assert engine.do(UPDATE.format(None))[-1] == expected(2, 4)
    trainer.do(CAPTURED)
    assert engine.do("result = len(gpu.opened)") == 1


def test_daemon_killed_between_publish_and_captured(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    trainer.do(CAPTURED)
    trainer.do(PUBLISH.format(2))
    node.daemon.kill()
    node.daemon.start()
    trainer.start(CAPTURED)
    assert engine.do(UPDATE.format(2))[-1] == expected(2, 4)
    trainer.finish()
    assert engine.do("result = len(gpu.opened)") == 1


def test_parameters_that_change_before_captured_are_found_by_their_checksums(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(PUBLISH.format(1) + "; live['a'][1, 2] += 1")
    with pytest.raises(RemoteError, match=r"a .*the bytes that are held are not those that rank 0 wrote") as caught:
        engine.do(UPDATE.format(None))
    assert caught.value.kind == "IntegrityError"
    assert engine.do("result = [reader.state, reader.version]") == ["dirty", None]
    trainer.do(PUBLISH.format(2) + "; live['a'][1, 2] -= 0")
    assert engine.do("result = reader.update(timeout=20).step") == 2
    trainer.do(CAPTURED)


def test_without_checksums_copies_are_compared_with_their_source(node: Node) -> None:
    trainer, engine = node.trainer(verify="off"), node.engine()
    trainer.do(PUBLISH.format(1))
    assert engine.do(UPDATE.format(None))[-1] == expected(1, 4)


TRY = """
try:
    reader.update({}, timeout=20)
    result = into["s"].tolist()
except Exception as error:
    result = type(error).__name__
"""


def test_tensor_turned_in_place_is_never_read_as_it_was(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do("square = gpu.tensors({'s': torch.arange(9.0).view(3, 3)})['s']; writer.register({'s': square})")
    engine.do("into = gpu.tensors({'s': torch.zeros(3, 3)}); reader.register(into)")
    trainer.do("publication = writer.publish(1)")
    assert engine.do("reader.update(); result = into['s'].tolist()") == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for step, turned in ((2, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]), (3, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])):
        trainer.do("publication.captured(timeout=20); square.data = square.data.t()")
        engine.start(TRY.format(step))
        trainer.do(f"publication = writer.publish({step})")
        got = engine.finish()
        if got == "VersionUnavailable":  # it had begun, and was told
            assert engine.do("result = reader.state") == "dirty"
            got = engine.do(f"reader.update({step}, timeout=20); result = into['s'].tolist()")
        assert got == turned


@pytest.mark.parametrize("how", ["all", "one"])
def test_tensors_rebound_between_steps_are_lent_where_they_are(node: Node, how: str) -> None:
    trainer, engine = node.trainer(), node.engine()
    for step in range(1, 6):
        engine.start(UPDATE.format(step))
        trainer.do(PUBLISH.format(step))
        assert engine.finish()[-1] == expected(step, 4)
        trainer.do(CAPTURED)
        names = "live" if how == "all" else "['a']"
        trainer.do(f"moved = gpu.tensors(live)\nfor name in {names}: live[name].data = moved[name]")
    assert node.job()["last_step"] == 5


GIVEN_BACK = """
old = dict(getattr(gpu, "allocations", {}))
moved = gpu.tensors(live)
for name, tensor in moved.items():
    live[name].data = tensor
for base in old:
    del gpu.allocations[base]
if torch.cuda.is_available():
    torch.cuda.empty_cache()
"""


def test_tensors_whose_memory_was_given_back_before_they_were_ever_lent(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    trainer.do(GIVEN_BACK)
    trainer.do(PUBLISH.format(1))
    assert engine.do(UPDATE.format(1))[-1] == expected(1, 4)
    trainer.do(CAPTURED)


def test_trainer_and_engine_in_one_process(node: Node) -> None:
    both = node.trainer()
    given = {"engine": "e", "rank": 0, "size": 1, "rows": 4, "mode": "direct", "verify": "checksum"}
    both.do(ENGINE.format(**given, socket=node.daemon.socket))
    for step in (1, 2):
        both.do(PUBLISH.format(step))
        assert both.do(UPDATE.format(None))[-1] == expected(step, 4)
        both.do(CAPTURED)
    assert both.do("result = len(gpu.opened)") == 0


# auto


def test_auto_lends_where_every_engine_waits_and_else_copies(node: Node) -> None:
    trainer = node.trainer(mode="auto")
    assert trainer.do(PUBLISH.format(1)) == ["host", "no engine is registered"]
    engine = node.engine()
    assert engine.do(UPDATE.format(None))[:4] == [1, "host", "shm", "no engine is registered"]
    assert trainer.do(PUBLISH.format(2)) == ["host", "rank 0 of engine e does not wait for it"]
    assert engine.do(UPDATE.format(None))[-1] == expected(2, 4)
    engine.start(UPDATE.format(3))
    node.await_engine_waits()
    assert trainer.do(PUBLISH.format(3)) == ["direct", ""]
    result = engine.finish()
    assert result[1:4] == ["direct", "cuda_ipc", "every engine waits, on this node's GPUs"]
    assert result[-1] == expected(3, 4)
    trainer.do(CAPTURED)
    assert node.job()["held"] == [[1, 2], [1, 1]]
    assert node.job()["choice"] == {"step": 3, "borrowed": True, "reason": "every engine waits, on this node's GPUs"}


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"uuids": ("GPU-7",)}, "cannot open memory of GPU-0"),
        ({"mode": "host"}, "cannot open memory of GPU-0"),
    ],
)
def test_auto_copies_for_engines_that_cannot_open_the_memory(node: Node, engine: dict[str, Any], why: str) -> None:
    trainer, reader = node.trainer(mode="auto"), node.engine(**engine)
    reader.start(UPDATE.format(1))
    node.await_engine_waits()
    mode, reason = trainer.do(PUBLISH.format(1))
    assert mode == "host"
    assert why in reason
    assert reader.finish()[-1] == expected(1, 4)


def test_case_30_memory_without_a_handle(node: Node) -> None:
    trainer, engine = node.trainer(mode="auto", refuse=("handle",)), node.engine()
    engine.start(UPDATE.format(1))
    node.await_engine_waits()
    mode, reason = trainer.do(PUBLISH.format(1))
    assert mode == "host"
    assert "expandable_segments" in reason
    assert engine.finish()[-1] == expected(1, 4)
    other = node.process(("GPU-0",), ("handle",))
    source = TRAINER.replace('"grpo"', '"other"')
    other.do(source.format(rank=0, size=1, rows=4, mode="direct", verify="off", socket=node.daemon.socket))
    with pytest.raises(RemoteError, match="expandable_segments") as caught:
        other.do(PUBLISH.format(1))
    assert caught.value.kind == "NotLendable"


def test_case_30_31_virtual_memory_is_handed_over_piece_by_piece(virtual: Node) -> None:
    trainer, engine, late = (
        virtual.trainer(rows=1000),
        virtual.engine(rows=1000),
        virtual.engine(name="late", rows=1000),
    )
    for step in (1, 2):
        assert trainer.do(PUBLISH.format(step)) == ["direct", ""]
        results = together([engine, late], [UPDATE.format(None)] * 2)
        assert [result[-1] for result in results] == [expected(step, 1000)] * 2
        trainer.do(CAPTURED)
    count = "import os; result = [len(gpu.opened), len(os.listdir('/proc/self/fd'))]"
    before = engine.do(count)
    assert before[0] == 1
    trainer.do(PUBLISH.format(3))
    engine.do(UPDATE.format(None))
    assert engine.do(count) == before
    trainer.kill()
    engine.do("import time; end = time.monotonic() + 20\nwhile gpu.opened and time.monotonic() < end: time.sleep(0.01)")
    assert engine.do("result = len(gpu.opened)") == 0


def test_virtual_memory_that_cannot_be_exported_is_named(virtual: Node) -> None:
    trainer = virtual.trainer(refuse=("export",))
    with pytest.raises(RemoteError, match="expandable_segments") as caught:
        trainer.do(PUBLISH.format(1))
    assert caught.value.kind == "NotLendable"


def test_owner_of_virtual_memory_dies_before_it_hands_it_over(virtual: Node) -> None:
    trainer, engine = virtual.trainer(rows=1000), virtual.engine(rows=1000)
    trainer.do(PUBLISH.format(1))
    trainer.stop()
    engine.start("result = told(reader.update(timeout=3))")
    until(virtual.daemon.socket, lambda _: virtual.job()["engines"][0]["workers"][0]["staged"] == [1, 1])
    trainer.kill()
    with pytest.raises(RemoteError, match="its first committed version") as caught:
        engine.finish()
    assert caught.value.kind == "DeadlineExceeded"
    assert engine.do("result = [reader.state, float(into['a'].sum())]") == ["empty", 0.0]


def test_engine_that_is_driven_through_its_own_calls(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine()
    engine.do(f"socket = {node.daemon.socket!r}" + CREW)
    for step in (1, 2):
        engine.start(f"result = told(instance.update({step}, timeout=20))")
        trainer.do(PUBLISH.format(step))
        assert engine.finish() == [step, "direct", "cuda_ipc", 'mode="direct"', expected(step, 4)]
        trainer.do(CAPTURED)


def test_reader_that_cannot_open_it_says_so_untouched(node: Node) -> None:
    trainer, engine = node.trainer(), node.engine(refuse=("open",))
    trainer.do(PUBLISH.format(1))
    with pytest.raises(RemoteError, match='mode="host"') as caught:
        engine.do(UPDATE.format(None))
    assert caught.value.kind == "VersionUnavailable"
    assert engine.do("result = [reader.state, float(into['a'].sum())]") == ["empty", 0.0]
    with pytest.raises(RemoteError, match="cannot be opened here"):
        trainer.do("publication.captured(timeout=0.2)")


def test_casts_and_host_tensors_cannot_be_lent(node: Node) -> None:
    trainer = node.trainer()
    trainer.do("writer.register({'a': live['a']}, dtype=torch.bfloat16)")
    with pytest.raises(RemoteError, match="a cast needs a copy"):
        trainer.do("writer.publish(1)")
    trainer.do("writer.register({'a': live['a'], 'c': torch.zeros(3)})")
    with pytest.raises(RemoteError, match="c is in host memory"):
        trainer.do("writer.publish(1)")
    with pytest.raises(RemoteError, match="has no host memory"):
        trainer.do("writer.begin(1)")


@pytest.mark.parametrize("how", ["writer.publish(4)", "update = writer.begin(4)"])
def test_next_step_through_host_memory_withdraws_what_is_lent(node: Node, how: str) -> None:
    trainer, engine = node.trainer(mode="auto"), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(None))
    engine.start(UPDATE.format(3))
    node.await_engine_waits()
    assert trainer.do(PUBLISH.format(3)) == ["direct", ""]
    engine.finish()
    assert node.job()["borrowed"] == [[1, 3]]
    trainer.do(how)
    assert node.job()["borrowed"] == []


def test_rollback_goes_to_held_versions_only(node: Node) -> None:
    trainer, engine = node.trainer(mode="auto"), node.engine()
    for step in (1, 2):
        trainer.do(PUBLISH.format(step))
    engine.do(UPDATE.format(None))
    engine.start(UPDATE.format(3))
    node.await_engine_waits()
    trainer.do(PUBLISH.format(3))
    engine.finish()
    trainer.do(CAPTURED)
    assert node.daemon.ask("rollback", job="grpo", step=1)["held"] == [[1, 1]]
    assert engine.do(UPDATE.format(None))[-1] == expected(1, 4)


def test_nothing_is_left_after_many_deaths(node: Node) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{node.daemon.pid}/fd").iterdir()))

    before = descriptors()
    for step in range(1, 6):
        trainer, engine = node.trainer(), node.engine()
        trainer.do(PUBLISH.format(step))
        engine.start(UPDATE.format(None))
        victim = trainer if step % 2 else engine
        victim.kill()
        for other in (trainer, engine):
            if other is not victim:
                other.kill()
        until(node.daemon.socket, lambda status: status["sessions"] == 1)
    assert node.job()["borrowed"] == []
    until(node.daemon.socket, lambda _: descriptors() <= before + 2)  # the connection that asks, and its pidfd
