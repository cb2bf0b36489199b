"""The transport rdma over UCX's TCP against what NIXL does by itself with the same bytes, over loopback.

A source and a target, each a process with a sidecar, with 1 GiB in memory objects. ``rdma-rate``: from the fetch called
to its end, connection, greeting and agents' introduction included, without checksums. The limit is the faster of two
bare NIXL writes of the same run, between two processes of their own: agents with NIXL's progress thread, as they are
made by default, and agents that are pumped. Nothing here says what a network with RDMA would do. With ``--write`` the
figure goes to ``benchmarks/results/nodes.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from awexd.bench.figures import Bar, Figure, names, quartiles, table, write
from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd.rdma.available import UCX_TLS, module, why_not
from awexd.rdma.child import DEFAULTS
from awexd.rdma.transport import TARGET, Rdma
from awexd_transports.base import Admission, Memory
from awexd_transports.ranges import Ranges
from awexd_transports.segment import HEADER_BYTES
from benchmarks.tcp import KEY, RESULTS, ROOT, SUBJECT, WITHIN, in_turn, memory_of, source_at

NBYTES = 1 << 30
PIECE = 32 << 20
AHEAD = 4
PUMP_SECONDS = 0.0001
BARE = ("thread", "pump")
BAR = Bar("ratio", ">=", 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--serve", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--bare", nargs=3, metavar=("SIDE", "WAY", "FD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault(UCX_TLS, "tcp")
    reason = why_not(os.environ)
    if reason is not None:
        sys.exit(f"benchmarks/rdma.py: {reason}")
    if arguments.serve is not None:
        uvloop.run(_serve(arguments.serve))
    elif arguments.bare is not None:
        side, way, fd = arguments.bare
        {"source": _bare_source, "target": _bare_target}[side](way, int(fd))
    else:
        figure = _measure(arguments.rounds)
        print("\n".join(table([figure])))
        if arguments.write:
            write(RESULTS, [figure], f"python benchmarks/rdma.py --rounds {arguments.rounds}", keep=names(RESULTS))


async def _serve(fd: int) -> None:
    server = Rdma().serve("127.0.0.1", 0, Admission("source", KEY, lambda run: 0))
    server.offer(SUBJECT, {0: Memory(fd, NBYTES)}, None)
    _say(server.address[1])
    await server.run()


# bare NIXL


def _agent(name: str, way: str, fd: int) -> tuple[Any, Any, int]:
    """An agent, what keeps the memory mapped and registered, and its address."""
    os.environ.update(DEFAULTS | os.environ)
    nixl = import_module(module() or "")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=way == "thread", backends=[]))
    agent.create_backend("UCX", {})
    mapped = mmap.mmap(fd, HEADER_BYTES + NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + HEADER_BYTES
    return agent, (mapped, agent.register_memory([(address, NBYTES, 0, "")], "DRAM")), address


def _bare_target(way: str, fd: int) -> None:
    agent, kept, address = _agent(f"target-{way}", way, fd)
    _say([agent.get_agent_metadata().hex(), address])
    busy = False
    while True:
        if select.select([sys.stdin], [], [], PUMP_SECONDS if busy else 1.0)[0]:
            line = sys.stdin.readline()
            if not line:
                del kept
                os._exit(0)
            busy = way == "pump" and json.loads(line)
        if busy:
            agent.get_new_notifs()


def _bare_source(way: str, fd: int) -> None:
    agent, kept, address = _agent(f"source-{way}", way, fd)
    metadata, remote = json.loads(sys.stdin.readline())
    name = agent.add_remote_agent(bytes.fromhex(metadata))
    _say(True)
    while sys.stdin.readline():
        waiting, posted = [(at, PIECE) for at in range(0, NBYTES, PIECE)], list[Any]()
        while waiting or posted:
            while waiting and len(posted) < AHEAD:
                at, nbytes = waiting.pop(0)
                sides = [agent.get_xfer_descs([(base + at, nbytes, 0)], "DRAM") for base in (address, remote)]
                handle = agent.initialize_xfer("WRITE", *sides, name)
                agent.transfer(handle)
                posted.append(handle)
            states = [agent.check_xfer_state(handle) for handle in posted]
            if "ERR" in states:
                raise RuntimeError("a bare write failed")
            for handle in [handle for handle, state in zip(posted, states, strict=True) if state == "DONE"]:
                posted.remove(handle)
                handle.release()
            if "DONE" not in states:
                time.sleep(PUMP_SECONDS)
        _say(True)
    del kept
    os._exit(0)


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


class _Process:
    """One of this script's own. ``close`` kills it."""

    def __init__(self, arguments: Sequence[str], fd: int) -> None:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            env=environ,
        )

    def hear(self) -> Any:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait()}")
        return json.loads(line)

    def tell(self, what: Any) -> None:
        pipe = _pipe(self._process.stdin)
        pipe.write(json.dumps(what).encode() + b"\n")
        pipe.flush()

    def close(self) -> None:
        with self._process:
            self._process.kill()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("a process without pipes")
    return pipe


@contextmanager
def _bare(way: str, held: Memory, into: Memory) -> Iterator[Callable[[], None]]:
    with ExitStack() as stack:
        target = _Process(["--bare", "target", way], into.fd)
        stack.callback(target.close)
        source = _Process(["--bare", "source", way], held.fd)
        stack.callback(source.close)
        source.tell(target.hear())
        source.hear()

        def run() -> None:
            target.tell(True)
            source.tell(True)
            source.hear()
            target.tell(False)

        yield run


def _measure(rounds: int) -> Figure:
    settings = PeerSettings()
    with ExitStack() as stack:
        held, into = (stack.enter_context(memory_of(NBYTES)) for _ in range(2))
        serving = _Process(["--serve"], held.fd)
        stack.callback(serving.close)
        source = source_at(serving.hear())
        stack.enter_context(TARGET.held())

        def ours() -> None:
            one = Fetcher(
                Rdma(settings), SUBJECT, {0: Ranges([(0, NBYTES)])}, {0: into}, verify=False, settings=settings
            )
            uvloop.run(one.run([source], WITHIN))

        ways: dict[str, Callable[[], None]] = {"rdma-rate": ours}
        for name in BARE:
            ways[name] = stack.enter_context(_bare(name, held, into))
        rates = in_turn(ways, rounds, held, into)
    bare = max((rates[name] for name in BARE), key=statistics.median)
    low, value, high = quartiles(rates["rdma-rate"])
    ratio = statistics.median(mine / limit for mine, limit in zip(rates["rdma-rate"], bare, strict=True))
    more = {"network": os.environ[UCX_TLS], **{f"bare_{name}": statistics.median(rates[name]) for name in BARE}}
    return Figure("rdma-rate", value, "GB/s", statistics.median(bare), ratio, BAR, low, high, rounds, more=more)


if __name__ == "__main__":
    main()
