"""Forks processes that have torch and the client loaded: a real process in milliseconds. See processes.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any


def main() -> None:
    parent = socket.socket(fileno=int(sys.argv[1]))
    import torch

    import awexd_client.adapters.registry
    from tests.e2e.workers import weights

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    known: dict[str, Any] = {name: getattr(awexd_client, name) for name in awexd_client.__all__}
    known |= {"torch": torch, "weights": weights, "os": os, "signal": signal}
    parent.sendall(b"+")
    while True:
        data, fds, _, _ = socket.recv_fds(parent, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            parent.close()
            _serve(socket.socket(fileno=fds[0]), known)
            os._exit(0)
        os.close(fds[0])
        parent.sendall(pid.to_bytes(4, "little"))


def _serve(link: socket.socket, namespace: dict[str, Any]) -> None:
    """Runs each line's source; answers with ``result`` or with the error. ``say(value)`` answers before the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stream = link.makefile("rwb")

    def say(value: object, **more: object) -> None:
        stream.write(json.dumps({"value": value, **more}).encode() + b"\n")
        stream.flush()

    namespace = {**namespace, "say": say, "hear": lambda: json.loads(stream.readline())}
    for line in stream:
        try:
            exec(json.loads(line), namespace)
        except BaseException as error:  # noqa: BLE001 - told to whoever sent the line
            say(None, kind=type(error).__name__, message=str(error), trace=traceback.format_exc())
        else:
            say(namespace.pop("result", None))


if __name__ == "__main__":
    main()
