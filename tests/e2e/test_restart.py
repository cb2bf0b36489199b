"""The daemon killed and started again: what was committed is back byte for byte, the rest is gone, clients go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from awexd.memory import FORMAT
from awexd_client import ManifestMismatch, VersionUnavailable, WeightWriter, WorkerWeightsReader
from tests.attacks.raw import until
from tests.daemons import Daemon
from tests.e2e.clients import Background, publish_all, restart

PATIENCE = 60.0


def weights(value: float, rank: int = 0) -> dict[str, torch.Tensor]:
    return {f"a{rank}": torch.full((1000,), value), f"b{rank}": torch.full((3,), value)}


def steps(daemon: Daemon) -> list[list[int]]:
    return [[v["epoch"], v["step"]] for v in daemon.ask("versions", job=None)["versions"]]


def test_case_24_committed_versions_are_back_and_uncommitted_ones_gone(daemon: Daemon) -> None:
    sources = [weights(0, rank) for rank in range(2)]
    writers = [WeightWriter("grpo", rank, 2, daemon.socket, verify="checksum") for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.register(sources[rank])
    for step in (1, 2, 3):
        for source in sources:
            for tensor in source.values():
                tensor.copy_(torch.randn(tensor.shape))
        publish_all(writers, step)
    last = {name: tensor.clone() for source in sources for name, tensor in source.items()}
    writers[0].publish(4)  # sealed by one rank of two
    update = writers[1].begin(4)
    update.write(sources[1])
    restart(daemon)
    assert steps(daemon) == [[1, 3], [1, 2]]
    assert len(daemon.segments()) == 4
    into = {name: torch.zeros_like(tensor) for name, tensor in last.items()}
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket, verify="checksum") as reader:
        reader.register(into)
        assert reader.update().step == 3
        assert all(torch.equal(tensor, last[name]) for name, tensor in into.items())
        assert reader.update(2).step == 2
        for _ in range(2):
            restart(daemon)
            assert reader.update(3).step == 3
        publish_all(writers, 4)
        assert reader.update().step == 4
    assert steps(daemon) == [[1, 4], [1, 3]]
    for writer in writers:
        writer.close()
    until(daemon.socket, lambda _: len(daemon.segments()) == 4)


def test_versions_of_another_segment_format_are_gone_and_the_job_goes_on(daemon: Daemon) -> None:
    into = weights(0)
    with (
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(weights(2))
        reader.register(into)
        writer.publish(1)
        daemon.kill()
        for name in daemon.segments():
            with open(f"/dev/shm/{name}", "r+b") as segment:
                segment.seek(8)  # the format, after the magic bytes
                segment.write((FORMAT - 1).to_bytes(4, "little"))
        daemon.start()
        assert steps(daemon) == []
        assert daemon.segments() == []
        writer.publish(2)
        assert reader.update().step == 2
    assert {value for tensor in into.values() for value in tensor.tolist()} == {2.0}


def test_attempt_numbers_are_never_used_twice(daemon: Daemon) -> None:
    """A number given out again would let a version pass for one that was committed before the restart."""
    source, into = weights(0), weights(-1)
    with (
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(source)
        reader.register(into)
        for step in range(1, 9):
            for tensor in source.values():
                tensor.fill_(step)
            writer.publish(step).committed(PATIENCE)
            assert steps(daemon)[0] == [1, step]
            assert reader.update().step == step
            assert set(into["a0"].flatten().tolist()) == {float(step)}
            restart(daemon)


def test_steps_of_versions_that_were_withdrawn_stay_used_after_a_restart(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.register(weights(1))
        writer.publish(1)
        writer.publish(2)
        daemon.ask("rollback", job="grpo", step=1)
        restart(daemon)
        assert steps(daemon) == [[1, 1]]
        with pytest.raises(ValueError, match="step 2 is not after step 2"):
            writer.publish(2)
        writer.publish(3).committed()
        assert steps(daemon) == [[1, 3], [1, 1]]


def test_reader_whose_registration_failed_after_a_restart_recovers(daemon: Daemon) -> None:
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
        into = weights(0)
        with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
            writer.register(weights(1))
            reader.register(into)
            writer.publish(1)
            reader.update()
        restart(daemon)
        with WeightWriter("grpo", 0, 1, daemon.socket) as other:
            other.register({"stranger": torch.zeros(2)})
            with pytest.raises(ManifestMismatch):
                reader.update()
            assert (reader.state, reader.version) == ("ready", (1, 1))
            other.register(weights(2))
            other.publish(2)
            assert reader.update().step == 2
            assert set(into["a0"].flatten().tolist()) == {2.0}


def test_new_epoch_survives_a_restart_between_the_ranks_first_publishes(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as old:
        old.register(weights(1))
        old.publish(57)
    writers = [WeightWriter("grpo", rank, 2, daemon.socket, epoch="new") for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.register(weights(2, rank))
    restart(daemon)
    publish_all(writers, 1)
    assert steps(daemon) == [[2, 1], [1, 57]]
    for writer in writers:
        writer.close()


def test_new_epoch_whose_ranks_had_not_all_come_survives_a_restart(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as old:
        old.register(weights(1))
        old.publish(57)
    writers = [WeightWriter("grpo", rank, 2, daemon.socket, epoch="new") for rank in range(2)]
    writers[0].register(weights(2, 0))
    restart(daemon)
    first = Background(lambda: writers[0].publish(1).committed(PATIENCE))
    writers[1].register(weights(2, 1))
    writers[1].publish(1).committed(PATIENCE)
    first.result()
    assert steps(daemon) == [[2, 1], [1, 57]]
    for writer in writers:
        writer.close()


def test_case_69_round_of_an_engine_outlives_the_daemon(daemon: Daemon) -> None:
    """Rank 0 has made its second update, rank 1 not yet: after the restart rank 1's second is of the same version."""
    readers = [WorkerWeightsReader("grpo", "e", rank, 2, daemon.socket) for rank in range(2)]
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.register(weights(0))
        for reader in readers:
            reader.register(weights(-1))
        writer.publish(1)
        assert [reader.update().step for reader in readers] == [1, 1]
        writer.publish(2)
        assert readers[0].update().step == 2
        restart(daemon)
        writer.publish(3).committed()
        readers[0].wait(1)  # it has come back: only it can tell what its engine runs on
        assert readers[1].update().step == 2
        assert [reader.update().step for reader in readers] == [3, 3]
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("call", ["close_job", "grant"])
def test_call_of_an_owner_after_a_restart(daemon: Daemon, call: str) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.register(weights(1))
        writer.publish(1)
        restart(daemon)
        getattr(writer, call)()
        assert steps(daemon) == ([] if call == "close_job" else [[1, 1]])


def test_long_form_whose_daemon_restarted_is_told_and_the_step_is_free(daemon: Daemon) -> None:
    source = weights(2)
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.register(source)
        writer.publish(1)
        with pytest.raises(ValueError, match="step 2") as caught, writer.begin(2) as update:  # noqa: PT012 - the block is what is tested
            update.write({"a0": source["a0"]})
            restart(daemon)
            update.write({"b0": source["b0"]})
        assert type(caught.value).__name__ == "VersionConflict"
        assert steps(daemon) == [[1, 1]]
        writer.publish(2).committed()
    assert steps(daemon) == [[1, 2], [1, 1]]


def test_reader_of_an_older_version_reads_it_after_a_restart_and_memory_goes_back(daemon: Daemon) -> None:
    into = weights(0)
    with (
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(weights(1))
        reader.register(into)
        for step in (1, 2):
            writer.publish(step)
        reader.update()
        restart(daemon)
        for step in range(3, 9):
            writer.publish(step).committed()
            with pytest.raises(VersionUnavailable):
                reader.update(1)
            reader.update()
        assert len(daemon.segments()) == 3
        job: Any = daemon.ask("status")["jobs"][0]
        assert job["segments"] == {"free": 1, "writing": 0, "sealed": 0, "held": 2}
