"""The awaitable names, on a loop, against a real daemon."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

import awexd_client
from awexd_client import InvalidArgument, VersionConflict, aio
from tests.daemons import Daemon


def test_both_modules_have_the_same_names() -> None:
    assert aio.__all__ == awexd_client.__all__ == sorted(awexd_client.__all__)


async def test_version_goes_from_writer_to_every_worker(daemon: Daemon) -> None:
    weights, held = {"a": torch.arange(6.0)}, [{"a": torch.zeros(6)} for _ in range(2)]
    async with aio.WeightWriter("j", 0, 1, daemon.socket) as writer:
        await writer.register(weights)
        workers = [await aio.WorkerWeightsReader("j", "e", rank, 2, daemon.socket) for rank in range(2)]
        for worker, tensors in zip(workers, held, strict=True):
            await worker.register(tensors)
        publication = await writer.publish(1)
        await publication.captured()
        await publication.committed()
        async with aio.WeightReader("j", "e", workers) as reader:
            result = await reader.update()
            assert (reader.state, reader.version) == ("ready", (1, 1))
        assert (result.epoch, result.step, len(result.workers)) == (publication.epoch, publication.step, 2)
        assert all(torch.equal(tensors["a"], weights["a"]) for tensors in held)
        await writer.close_job()
        for worker in workers:
            await worker.close()


async def test_long_form_seals_or_aborts(daemon: Daemon) -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    async with aio.WeightWriter("j", 0, 1, daemon.socket) as writer:
        await writer.register(weights)
        async with await writer.begin(1) as update:
            await update.write({"a": weights["a"]})
            await update.write({"b": weights["b"]})
        await update.publication.committed()
        with pytest.raises(RuntimeError, match="on purpose"):
            async with await writer.begin(2) as update:
                raise RuntimeError("on purpose")
        with pytest.raises(VersionConflict):
            await update.publication.captured()
        await writer.close_job()


async def test_loop_runs_on_while_a_call_waits_and_a_cancelled_wait_blocks_nothing(daemon: Daemon) -> None:
    held = {"a": torch.zeros(4)}
    async with (
        aio.WeightWriter("j", 0, 1, daemon.socket) as writer,
        aio.WorkerWeightsReader("j", "e", 0, 1, daemon.socket) as reader,
    ):
        await writer.register({"a": torch.ones(4)})
        await reader.register(held)
        waiting = asyncio.create_task(reader.wait(99))
        begun = time.monotonic()
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert time.monotonic() - begun < 5
        other = asyncio.create_task(reader.wait(1))
        await writer.publish(1)
        assert await other == (1, 1)
        assert (await reader.update(step=1)).step == 1
        assert held["a"].tolist() == [1.0] * 4
        await writer.close_job()


async def test_cancelled_update_touches_nothing_later(daemon: Daemon) -> None:
    held = {"a": torch.zeros(4)}
    async with (
        aio.WeightWriter("j", 0, 1, daemon.socket) as writer,
        aio.WorkerWeightsReader("j", "e", 0, 1, daemon.socket) as reader,
    ):
        await writer.register({"a": torch.ones(4)})
        await reader.register(held)
        waiting = asyncio.create_task(reader.update(step=2))
        await asyncio.sleep(0)  # it has been handed to its thread
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await writer.publish(1)
        await writer.publish(2)
        assert (await reader.stage()).step == 2  # the cancelled one has had its turn
        assert (reader.state, held["a"].tolist()) == ("empty", [0.0] * 4)
        await writer.close_job()


async def test_use_before_it_is_awaited_and_after_close_is_refused(daemon: Daemon) -> None:
    writer = aio.WeightWriter("j", 0, 1, daemon.socket)
    with pytest.raises(InvalidArgument, match="await the WeightWriter first"):
        await writer.publish(1)
    await writer
    await writer.close()
    with pytest.raises((InvalidArgument, RuntimeError)):
        await writer.publish(1)
