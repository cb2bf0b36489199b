"""Peers' hand-overs of the MoE set, in turn with awexd's: what a trainer's and an engine's process on one GPU do."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from awexd.bench.figures import Bar, Figure, quartiles
from awexd.bench.gpu.pair import WHOLE, Pair, Rounds
from awexd.bench.gpu.weights import Weights
from awexd.bench.link import Side, SideFailed
from benchmarks.peers.environments import environment

BAR = Bar("ratio", ">=", 1)
CHECKED_STEP = 7
PEER_SECONDS = 60.0
"""What one step of a peer's own machinery may take."""
PEERS = {"peer-copy-loop": "copy_ loop", "peer-foreach": "_foreach_copy_", "peer-buckets": "flattened buckets"}
NOTES = {
    "peer-copy-loop": (
        "copy_ of each tensor out of the trainer's memory, opened before by torch's own reductions: the copies alone, "
        "without a word between the processes"
    ),
    "peer-foreach": "torch._foreach_copy_ of all at once, otherwise as peer-copy-loop",
    "peer-buckets": (
        "as SGLang's trainers update a colocated engine: 512 MiB flattened buckets, each one's IPC handle pickled with "
        "its tensors' shapes, opened, copied out of, acknowledged"
    ),
}


@contextlib.contextmanager
def turns(pair: Pair) -> Iterator[dict[str, Callable[[int], float]]]:
    """What takes turns with awexd's rounds: seconds of each. A pair of ``benchmarks.peers.gpu_sides``.

    Step 0 is the round that is checked: with other weights than awexd has brought.
    """
    writer, reader = pair.writer, pair.reader
    writer.tell("share")
    reader.ask("open_shared")
    writer.answer("share")

    def copies(how: str) -> float:
        return float(reader.ask("copy_shared", how=how)["seconds"])

    def buckets() -> float:
        reader.ask("receive_buckets")
        writer.tell("send_buckets")
        started, ended = writer.answer("send_buckets")["started"], reader.answer("receive_buckets")["ended"]
        return float(ended - started) / 1e9

    def checked(call: Callable[[], float], at: int) -> Callable[[int], float]:
        def round_(step: int) -> float:
            if step:
                return call()
            writer.ask("change", step=CHECKED_STEP + at)
            seconds = call()
            found = reader.ask("check", step=CHECKED_STEP + at)
            if found["count"]:
                raise SideFailed(f"a peer brought other bytes: {found['wrong']}")
            return seconds

        return round_

    calls = (lambda: copies("loop"), lambda: copies("foreach"), buckets)
    try:
        yield {name: checked(call, at) for at, (name, call) in enumerate(zip(PEERS, calls, strict=True))}
    finally:
        with contextlib.suppress(SideFailed):
            reader.ask("close_shared")


def figures(found: Rounds) -> Iterator[Figure]:
    """The peers' times over awexd's, round by round."""
    for name, times in found.beside.items():
        yield _compared(name, found.total, times, PEERS[name], NOTES[name])


def checkpoint_engine(
    name: str, interpreter: Path, weights: Weights, rounds: int, ours: tuple[list[float], list[float]]
) -> Figure:
    """Its update of the set against awexd's ``update`` through host memory, measured in the same run.

    Args:
        ours: seconds of awexd's publish and update, a number a round.
    """
    ends = socket.socketpair()
    command = [str(interpreter), "-m", "benchmarks.peers.checkpoint_engine_gpu"]
    with contextlib.ExitStack() as stack:
        sides = []
        for end, role in zip(ends, ("server", "engine"), strict=True):
            stack.enter_context(end)
            fd = end.fileno()
            side = Side(
                f"checkpoint-engine's {role}", [*command, role, str(fd)], fds=[fd], environ=environment(), patience=5.0
            )
            sides.append(stack.enter_context(side))
            side.tell("prepare", weights=asdict(weights), cut=asdict(WHOLE))
        server, engine = sides
        for side in sides:
            side.answer("prepare", PEER_SECONDS)
        registered, updated = [], []
        for step in range(1, rounds + 2):
            server.tell("register", step=step)
            registered.append(float(server.answer("register", PEER_SECONDS)["seconds"]))
            engine.ask("update")
            server.tell("update")
            updated.append(float(server.answer("update", PEER_SECONDS)["seconds"]))
            engine.answer("update", PEER_SECONDS)
            found = engine.ask("check", step=step)
            if found["count"]:
                raise SideFailed(f"checkpoint-engine brought other bytes: {found['wrong']}")
    note = (
        "checkpoint-engine 0.4.2: register_checkpoint out of the trainer's GPU memory into its page-locked pool, then "
        "ParameterServer.update to update_weights_from_ipc in the engine's process; its way is through host memory, so "
        "its update is compared with awexd's through host memory, and its registration with publish (more)"
    )
    figure = _compared(name, ours[1], updated[1:], "checkpoint-engine 0.4.2", note)
    publish, register = statistics.median(ours[0]), statistics.median(registered[1:])
    figure.more.update(publish=publish * 1e3, peer_register=register * 1e3, ratio_register=register / publish)
    return figure


def _compared(name: str, mine: list[float], theirs: list[float], peer: str, note: str) -> Figure:
    low, value, high = quartiles([one * 1e3 for one in mine])
    other = statistics.median(theirs) * 1e3
    pairs = zip(mine, theirs, strict=True) if len(mine) == len(theirs) else [(value, other)]
    return Figure(
        name,
        value,
        "ms",
        ratio=statistics.median(their / my for my, their in pairs),
        bar=BAR,
        low=low,
        high=high,
        rounds=len(theirs),
        peer={"name": peer, "value": other, "quoted": False},
        note=note,
    )
