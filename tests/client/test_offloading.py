"""Weights offloaded and restored: what is held is not copied, what is not is parked, and all of it comes back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

from awexd_client import (
    BudgetExceeded,
    DeadlineExceeded,
    InvalidArgument,
    ManifestMismatch,
    Shard,
    VersionConflict,
    WeightWriter,
    WorkerWeightsReader,
    aio,
)
from awexd_transports.cuda.bits import differs
from awexd_transports.view import View
from tests.client.samples import weights
from tests.client.test_parking import bits, no_more_memory, sizes
from tests.daemons import Daemon
from tests.e2e.clients import Background

Tensors = dict[str, torch.Tensor]


class Tied(nn.Module):
    """Tied embeddings, a fused projection that is registered in parts, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.mid = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.rand(3))


def state(module: nn.Module) -> Tensors:
    return {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}


@pytest.fixture
def model() -> Tied:
    return Tied()


def pinned(daemon: Daemon) -> list[list[int]]:
    return [pin["version"] for pin in daemon.ask("status")["jobs"][0]["pinned"]]


def parked(daemon: Daemon) -> int:
    """Bytes."""
    found = daemon.ask("status")["jobs"][0]["parked"]
    return sum(parcel["bytes"] for parcel in found if parcel["state"] == "pinned")


@pytest.mark.parametrize("verify", ["checksum", "off"])
@pytest.mark.usefixtures("each_way")
def test_held_weights_are_not_copied_and_come_back(
    daemon: Daemon, reader: WorkerWeightsReader, model: Tied, verify: str
) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in state(model).items()}
    parameters = dict(model.named_parameters())
    with WeightWriter("grpo", 0, 1, daemon.socket, verify=verify) as writer:
        writer.register(model)
        reader.register(into)
        for step in (1, 2, 3, 4):
            for tensor in state(model).values():
                tensor.add_(step)
            before = bits(state(model))
            writer.publish(step)
            writer.offload()
            assert sizes(state(model)) == {0}
            assert (pinned(daemon), parked(daemon)) == ([[1, step]], 0)
            assert reader.update(step).step == step
            assert bits(into) == before
            others = [torch.zeros(50, 8) for _ in range(20)]
            writer.restore()
            assert others
            assert bits(state(model)) == before
            assert pinned(daemon) == []
            assert all(dict(model.named_parameters())[name] is tensor for name, tensor in parameters.items())
            assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    daemon.await_segments(2)


def test_what_no_version_has_is_parked(daemon: Daemon, model: Tied) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.register(model, dtype={"mid.*": torch.float32})
        before = bits(state(model))
        for publish, expected in ((False, []), (True, [[1, 1]])):
            if publish:
                writer.publish(1)
            writer.offload()
            assert sizes(state(model)) == {0}
            assert pinned(daemon) == expected
            assert parked(daemon) > 0
            writer.restore()
            assert bits(state(model)) == before
        held = parked(daemon)
        with writer.begin(2) as update:  # of other tensors, perhaps
            update.write({name: torch.zeros_like(tensor) for name, tensor in state(model).items()})
        writer.offload()
        assert (pinned(daemon), held) == ([], 0)
        writer.restore()
        assert bits(state(model)) == before


@pytest.mark.usefixtures("each_way")
def test_change_since_the_publication_is_noticed_and_parked(
    daemon: Daemon, writer: WeightWriter, model: Tied, caplog: pytest.LogCaptureFixture
) -> None:
    writer.register(model)
    writer.publish(1)
    with torch.no_grad():
        model.mid.weight[3, 4] = float("nan")
    before = bits(state(model))
    with caplog.at_level(logging.WARNING):
        writer.offload()
    assert "1 storages were changed since step 1 was published" in caplog.text
    assert pinned(daemon) == [[1, 1]]
    assert 128 <= parked(daemon) < 2000
    writer.restore()
    assert bits(state(model)) == before
    for tensor in state(model).values():
        tensor.add_(1)
    before = bits(state(model))
    writer.offload()
    assert pinned(daemon) == []
    writer.restore()
    assert bits(state(model)) == before


def test_nothing_else_goes_on_while_offloaded(daemon: Daemon, writer: WeightWriter) -> None:
    live = weights(1)
    with pytest.raises(InvalidArgument, match="register"):
        writer.offload()
    writer.register(live)
    with pytest.raises(InvalidArgument, match="nothing is offloaded"):
        writer.restore()
    writer.publish(1)
    update = writer.begin(2)
    with pytest.raises(InvalidArgument, match="step 2 is being written"):
        writer.offload()
    update.__exit__(KeyError, KeyError(), None)
    writer.publish(3)
    writer.offload()
    for call in (
        lambda: writer.offload(),
        lambda: writer.publish(4),
        lambda: writer.begin(4),
        lambda: writer.register(live),
    ):
        with pytest.raises(InvalidArgument, match=r"offloaded; restore\(\) comes first"):
            call()
    with pytest.raises(InvalidArgument, match=r"comes back by restore\(\)"):
        writer.restore("awexd.offload")
    for step in (None, 3):
        with pytest.raises(VersionConflict, match="is the only copy of the weights of rank 0"):
            daemon.ask("drop", job="grpo", step=step)
    writer.restore()
    writer.publish(4).committed()
    assert daemon.ask("drop", job="grpo", step=None)["held"] == []


def test_rollback_of_a_pinned_version_is_refused(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register(weights(1))
    for step in (1, 2):
        writer.publish(step).committed()
    writer.offload()
    with pytest.raises(VersionConflict, match="epoch 1 step 2 is the only copy"):
        daemon.ask("rollback", job="grpo", step=1)
    writer.restore()
    assert daemon.ask("rollback", job="grpo", step=1)["held"] == [[1, 1]]


def test_pinned_version_outlives_keep_and_does_not_stop_others(daemon: Daemon) -> None:
    """A rank that died offloaded, and a trainer after it that publishes on: its version stays until it is let go."""
    live = weights(7)
    before = bits(live)
    with WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as writer:
        writer.register(live)
        writer.publish(1)
        writer.offload()
    with WeightWriter("grpo", 0, 1, daemon.socket, epoch="new", keep=1) as writer:
        writer.register(live := weights(0))
        for step in range(1, 6):
            writer.publish(step).committed()
        assert pinned(daemon) == [[1, 1]]
        writer.restore()
        assert bits(live) == before
        assert pinned(daemon) == []
        writer.publish(6).committed()
        writer.offload()
        writer.restore()
        assert bits(live) == before
    with WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as writer:
        writer.register(live)
        writer.publish(7)
        writer.offload()
    with WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as writer:
        writer.register(live := weights(3))
        with pytest.raises(VersionConflict, match="has offloaded into step 7"):
            writer.offload()
        writer.publish(8)
        with pytest.raises(VersionConflict, match="has offloaded into epoch 2 step 7 already"):
            writer.offload()
        writer.discard()
        writer.offload()
        writer.restore()


def test_earlier_process_with_other_tensors_is_refused(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.register(weights(7), dtype={"a": torch.float64})
        writer.publish(1)
        writer.offload()
    live = {**weights(0), "c": torch.zeros(3)}
    with WeightWriter("grpo", 0, 1, daemon.socket, epoch="new") as writer:
        writer.register(live)
        with pytest.raises(ManifestMismatch, match=r"1 missing \(c\)"):
            writer.restore()
        assert not any(bool(tensor.any()) for tensor in live.values())


@pytest.mark.parametrize("published", [True, False])
def test_restore_without_room_may_be_tried_again(writer: WeightWriter, daemon: Daemon, published: bool) -> None:
    live = {"small": torch.ones(100), "large": torch.arange(float(64 << 20))}
    writer.register(live)
    if published:
        writer.publish(1)
    writer.offload()
    with no_more_memory(), pytest.raises(BudgetExceeded, match=r"large.*: no room"):
        writer.restore()
    assert sizes(live) == {0}
    assert pinned(daemon) == ([[1, 1]] if published else [])
    writer.restore()
    assert torch.equal(live["large"], torch.arange(float(64 << 20)))


def test_memory_that_is_not_wholly_registered_is_refused(daemon: Daemon, writer: WeightWriter) -> None:
    whole = torch.arange(100.0)
    writer.register([Shard("w", whole[:50], (50,), (0,))])
    writer.publish(1)
    with pytest.raises(InvalidArgument, match="w: a view of a storage of 400 bytes"):
        writer.offload()
    assert (pinned(daemon), int(whole.sum())) == ([], 4950)
    writer.register([Shard("w", whole[:50], (100,), (0,)), Shard("w", whole[50:], (100,), (50,))])
    writer.publish(2)
    writer.offload()
    assert (pinned(daemon), parked(daemon)) == ([[1, 2]], 0)
    writer.restore()
    assert torch.equal(whole, torch.arange(100.0))


@pytest.fixture
def replicas(daemon: Daemon) -> Iterator[list[tuple[WeightWriter, Tensors]]]:
    """Two ranks with the same tensors, and one each of their own: each publishes its share."""
    writers = [WeightWriter("grpo", rank, 2, daemon.socket) for rank in range(2)]
    live: list[Tensors] = [{f"w{n}": torch.full((500,), float(n)) for n in range(8)} for _ in range(2)]
    for rank, tensors in enumerate(live):
        tensors[f"own{rank}"] = torch.full((64,), 100.0 + rank)
        writers[rank].register(tensors)
    yield list(zip(writers, live, strict=True))
    for writer in writers:
        writer.close()


def test_replicas_come_back_out_of_each_others_segments(
    daemon: Daemon, replicas: list[tuple[WeightWriter, Tensors]]
) -> None:
    before = [bits(live) for _, live in replicas]
    for step in (1, 2):
        publications = [Background(partial(writer.publish, step)) for writer, _ in replicas]
        for publication in publications:
            publication.result()
        for writer, live in replicas:
            writer.offload()
            assert sizes(live) == {0}
        assert (pinned(daemon), parked(daemon)) == ([[1, step]], 0)
        for (writer, live), expected in zip(replicas, before, strict=True):
            writer.restore()
            assert bits(live) == expected
        assert pinned(daemon) == []


def test_offload_waits_for_the_other_ranks_and_parks_what_does_not_commit(
    daemon: Daemon, replicas: list[tuple[WeightWriter, Tensors]]
) -> None:
    (first, live), (second, _) = replicas
    before = bits(live)
    second.begin(1)
    first.publish(1)
    with pytest.raises(DeadlineExceeded, match="rank 1 to seal step 1"):
        first.offload(timeout=0.2)
    assert bits(live) == before
    offloading = Background(lambda: first.offload())
    second._abort(second._open, "the test says so")  # type: ignore[arg-type]
    offloading.result()
    assert (pinned(daemon), parked(daemon) > 0) == ([], True)
    first.restore()
    assert bits(live) == before


def test_comparison_where_the_weights_lie() -> None:
    """As it is done on devices; torch's own, so that it can be seen here."""
    for live in (
        torch.randn(300, 70),
        torch.randn(300, 70, dtype=torch.complex128)[::2],
        torch.tensor(float("nan")),
        torch.zeros(4, 0),
        torch.randn(64).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ):
        held = live.clone()
        assert not differs(View.of(live), View.of(held))
        if held.numel():
            raw = held.untyped_storage()
            raw[len(raw) - 1] = raw[len(raw) - 1] ^ 128
            assert differs(View.of(live), View.of(held))


async def test_awaitable(daemon: Daemon) -> None:
    live, optimizer = weights(1), [torch.ones(4)]
    async with aio.WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        await writer.register(live)
        await writer.publish(1)
        await writer.park("optimizer", optimizer)
        await writer.offload()
        assert sizes({**live, "o": optimizer[0]}) == {0}
        await writer.restore()
        await writer.restore("optimizer")
        await writer.park("optimizer", optimizer)
        await writer.discard("optimizer")
    assert live["a"].sum() == 12
