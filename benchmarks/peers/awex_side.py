"""awex: its colocated writer and reader with ``weights_exchange_ipc_backend="cpu"``; its planner; its MetaServer.

Runs in awex's own environment. Its writer and reader cannot be made without Megatron and an engine, so the calls of
``_write_weights_in_colocate_mode`` and ``collect_training_weights`` are made here in their order, less the waits: what
is pickled goes through a socket, not through the MetaServer, whose clients poll.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
import warnings
from typing import Any

os.environ.setdefault("AWEX_DEVICE_TYPE", "cpu")
warnings.filterwarnings("ignore")

from awexd.bench.limits import peak_gigabytes
from awexd.bench.link import Answer, serve
from awexd.bench.weights import Weights, fill, mapping, mark, source_tensors, wrong


class Writer:
    def __init__(self, peer: int) -> None:
        self.peer = socket.socket(fileno=peer)
        self.shared: list[Any] = []

    def open(self, weights: dict[str, Any]) -> Answer:
        self.weights = Weights(**weights)
        self.memory = mapping(self.weights.nbytes)
        fill(self.memory)
        self.tensors = source_tensors(self.weights, self.memory)
        return {}

    def publish(self, step: int) -> Answer:
        from awex.util.tensor_util import group_tensors_by_shape_and_dtype, ipc_serialize

        mark(self.weights, self.memory, step)
        started = time.monotonic_ns()
        tensors = [tensor.cpu() for tensor in self.tensors.values()]
        groups, metadata = group_tensors_by_shape_and_dtype(tensors)
        self.shared = [group.cpu().share_memory_() for group in groups]
        body = ipc_serialize((self.shared, metadata, list(self.tensors)))
        self.peer.sendall(len(body).to_bytes(8, "little") + body)
        return {"started": started, "ended": time.monotonic_ns()}

    def release(self) -> Answer:
        from awex.util.tensor_util import release_tensors

        release_tensors(self.shared)
        self.shared = []
        return {}


class Reader:
    def __init__(self, peer: int) -> None:
        self.peer = socket.socket(fileno=peer)

    def open(self, weights: dict[str, Any]) -> Answer:
        self.weights = Weights(**weights)
        self.memory = mapping(self.weights.nbytes)
        self.tensors = source_tensors(self.weights, self.memory)
        return {}

    def update(self) -> Answer:
        import torch
        from awex.util.tensor_util import reconstruct_ipc_weights

        with self.peer.makefile("rb") as stream:
            body = stream.read(int.from_bytes(stream.read(8), "little"))
        received, _ = reconstruct_ipc_weights(body, ipc_backend="cpu", device_id="cpu")
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(received[name])
        return {"ended": time.monotonic_ns()}

    def check(self, step: int) -> Answer:
        return {"wrong": wrong(self.weights, self.memory, step)[:5]}


class Planner:
    """``TransferPlanBuilder`` on the jobs of ``benchmarks/jobs.py``; seconds exclude building its metadata."""

    def plan(self, job: str, rank: int | None = None) -> Answer:
        from awex.transfer.transfer_plan import TransferPlanBuilder

        from benchmarks.jobs import JOBS

        described = JOBS[job]()
        training = _metadata(described.trainer)
        inference = _metadata(described.engine)
        infer_ranks = len(described.engine) * described.engines
        before = peak_gigabytes()
        builder = TransferPlanBuilder(infer_ranks, len(described.trainer), described.engines)
        started = time.perf_counter()
        operations = builder.build_weights_mapping_operations(inference, training, rank)
        seconds = time.perf_counter() - started
        sent: dict[int, int] = {}
        for operation in operations:
            size = operation.send_shard_meta.dtype.itemsize
            for extent in operation.overlap_shape:
                size *= extent
            sent[operation.send_rank] = sent.get(operation.send_rank, 0) + size
        balance = max(sent.values()) * len(described.trainer) / sum(sent.values())
        return {
            "seconds": seconds,
            "operations": len(operations),
            "balance": balance,
            "gigabytes": peak_gigabytes(),
            "gigabytes_before": before,
        }


def _metadata(ranks: list[Any]) -> list[Any]:
    """awex's ParameterMeta of what the ranks hold: the k-th holder of each box belongs to replica k."""
    import torch
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta

    dtypes = {"bfloat16": torch.bfloat16}
    holders: dict[str, dict[Any, list[Any]]] = {}
    specs: dict[str, Any] = {}
    for number, rows in enumerate(ranks):
        for name, dtype, shape, offset, extent in rows:
            numel = 1
            for size in extent:
                numel *= size
            shard = ParameterShardMeta(
                0, 0, 0, 0, 0, number, len(ranks), 0, name, extent, numel, dtypes[dtype], offset
            )  # fmt: skip
            specs[name] = (dtype, shape)
            holders.setdefault(name, {}).setdefault((offset, extent), []).append(shard)
    found = []
    for name, boxes in holders.items():
        dtype, shape = specs[name]
        count = min(len(shards) for shards in boxes.values())
        replicas = [ParameterReplicaMeta([shards[k] for shards in boxes.values()]) for k in range(count)]
        numel = 1
        for size in shape:
            numel *= size
        everyone = [shard for shards in boxes.values() for shard in shards]
        found.append(ParameterMeta(name, numel, shape, dtypes[dtype], everyone, replicas))
    return found


class Server:
    """The MetaServer on the loopback interface, in a process of its own, and two of its clients."""

    def measure(self, rounds: int) -> Answer:
        """Milliseconds of a put and a get; and from a put to the return of the get that waited for it."""
        from awex.meta.meta_server import MetaServerClient, start_meta_server, stop_meta_server

        address, port = start_meta_server("127.0.0.1", 0)
        try:
            ours, theirs = MetaServerClient(address, port), MetaServerClient(address, port)
            direct = []
            for number in range(rounds * 10):
                started = time.perf_counter()
                ours.put_object(f"direct-{number}", {"step": number})
                theirs.get_object(f"direct-{number}")
                direct.append((time.perf_counter() - started) * 1e3)
            waited = [self._waited(ours, theirs, number) for number in range(rounds)]
        finally:
            stop_meta_server()
        return {"direct": direct, "waited": waited, "median": statistics.median(direct)}

    def start(self) -> Answer:
        """Starts it; ``stop`` ends it."""
        from awex.meta.meta_server import start_meta_server

        address, port = start_meta_server("127.0.0.1", 0)
        return {"address": address, "port": int(port)}

    def stop(self) -> Answer:
        from awex.meta.meta_server import stop_meta_server

        stop_meta_server()
        return {}

    def _waited(self, ours: Any, theirs: Any, number: int) -> float:
        ended: list[float] = []

        def wait() -> None:
            theirs.get_object(f"waited-{number}", timeout=60)
            ended.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.05 + 0.037 * (number % 8))  # a step takes as long as it takes; the client polls meanwhile
        started = time.perf_counter()
        ours.put_object(f"waited-{number}", {"step": number})
        waiter.join()
        return (ended[0] - started) * 1e3


def main() -> None:
    role, *peers, link = sys.argv[1:]
    makers: dict[str, Any] = {"writer": Writer, "reader": Reader, "planner": Planner, "server": Server}
    side = makers[role](*map(int, peers))
    names = ("open", "publish", "release", "update", "check", "plan", "measure", "start", "stop")
    serve(int(link), {name: getattr(side, name) for name in names if hasattr(side, name)})


if __name__ == "__main__":
    main()
