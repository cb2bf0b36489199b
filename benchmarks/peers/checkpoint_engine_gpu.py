"""checkpoint-engine on one GPU: its ParameterServer in a process, its worker's ``update_weights_from_ipc`` in another.

``python -m benchmarks.peers.checkpoint_engine_gpu server|engine LINK_FD LINK``. The server registers the trainer's
tensors (copies them into page-locked memory) and then updates: host to device, a broadcast in a group of one, and
buckets that the engine opens by IPC and copies out of. The engine's load function copies into its parameters.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from awexd.bench.gpu.devices import Cuda
from awexd.bench.gpu.side import Source, Target
from awexd.bench.link import Answer, nanoseconds, serve

NAME = "bench"
PORT = "29513"
os.environ.setdefault("LOGURU_LEVEL", "WARNING")
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)


class ServerSide(Source):
    names = (*Source.names, "register", "update")

    def __init__(self, link: socket.socket) -> None:
        super().__init__(Cuda())
        self._link = link
        self._server: Any = None

    def register(self, step: int) -> Answer:
        """Brings the weights of a step into its pool of page-locked memory, which it keeps."""
        from checkpoint_engine import ps

        self.change(step)
        first = self._server is None
        if first:
            ps.get_ip = lambda: "127.0.0.1"  # it would ask a public address for the way there
            self._server = ps.ParameterServer(auto_pg=False)
            self._server.init_process_group()
        started = nanoseconds()
        if not first:
            self._server.unregister_checkpoint(NAME)
        named = {part.key: tensor for part, tensor in self.held}
        self._server.register_checkpoint(NAME, named_tensors=named, use_shared_memory_pool=True)
        self.device.synchronize()
        ended = nanoseconds()
        self._server.gather_metas(NAME)
        return {"seconds": (ended - started) / 1e9}

    def update(self) -> Answer:
        started = nanoseconds()
        self._server.update(NAME, self._tell)
        return {"seconds": (nanoseconds() - started) / 1e9}

    def _tell(self, paths: list[tuple[str, str]]) -> None:
        """The engine is asked to connect; returns when it has all."""
        self._link.sendall(paths[0][1].encode().ljust(256))
        self._link.recv(1)


class EngineSide(Target):
    names = (*Target.names, "update")

    def __init__(self, link: socket.socket) -> None:
        super().__init__(Cuda())
        self._link = link
        self._context: Any = None

    def update(self) -> Iterator[Answer]:
        import torch
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        own = {part.key: tensor for part, tensor in self.held}

        def load(weights: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                own[name].copy_(tensor)

        self._context = self._context or zmq.Context()
        yield {}
        path = self._link.recv(256, socket.MSG_WAITALL).decode().strip()
        update_weights_from_ipc(self._context, path, 0, run=load)
        self._link.sendall(b"+")
        yield {}


def main() -> None:
    role, link, own = sys.argv[1], *map(int, sys.argv[2:])
    side: Any = {"server": ServerSide, "engine": EngineSide}[role](socket.socket(fileno=link))
    serve(own, side.operations())


if __name__ == "__main__":
    main()
