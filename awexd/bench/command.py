"""``awexctl bench``: what this machine can do at best, awexd against it, and one line of verdict on each."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import orjson

from awexd.bench import limits
from awexd.bench.daemon import daemon
from awexd.bench.figures import Figure, machine, quantile, quartiles, table
from awexd.bench.handover import KEEP, WARM_ROUNDS, Pair, figure, measure, pair, tiny
from awexd.bench.link import SideFailed
from awexd.bench.weights import Weights
from awexd_transports.errors import AwexdError, InvalidArgument
from awexd_transports.native import load

GIB, MIB = 1 << 30, 1 << 20
TENSORS = 400
ROUNDS, QUICK_ROUNDS = 9, 3
CONTROL_ROUNDS, QUICK_CONTROL_ROUNDS = 1000, 50
COPIES = 3 + KEEP + 1
"""Of the size in memory at once: the two processes', the baseline's between them, and the daemon's slots."""
NEAR, FAR = 1.25, 2.0
"""Times two plain copies: up to here as it should be; up to there worth a look."""
FIXED_SECONDS = 0.005
"""What the control path and the tensors themselves may cost at any size."""
CONTROL_MS, CONTROL_P99_MS = 1.0, 2.0
BUSY = "more than it should be; is this machine busy?"


def main(arguments: argparse.Namespace) -> int:
    """Runs it; 0 where everything could be measured, whatever the figures."""
    asked: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    figures = []
    try:
        for figure in _on_gpu(arguments) if arguments.gpu else _in_host_memory(arguments):
            if asked:  # where it came, nothing can be raised: in a finalizer, say
                raise KeyboardInterrupt
            figures.append(figure)
    except (AwexdError, SideFailed) as error:
        print(f"awexctl bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("awexctl bench: stopped; nothing is left behind", file=sys.stderr)
        return 128 + asked[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    given = [f"--{name}" for name in ("gpu", "quick") if getattr(arguments, name)]
    command = " ".join(["awexctl bench", *given])
    if arguments.json:
        found = {"machine": machine(), "copies": _copied_by(), "figures": [one.as_dict(command) for one in figures]}
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        told = [f"{machine()}; copies by {_copied_by()}", "", *table(figures), ""]
        print("\n".join([*told, *(f"{one.name}: {one.note}" for one in figures)]))
    return 0


def _on_gpu(arguments: argparse.Namespace) -> Iterator[Figure]:
    from awexd.bench.gpu import command

    where = command.place()
    with _daemon(arguments.socket) as path:
        yield from command.measured(where, path, arguments.size, _say, quick=arguments.quick)


def _in_host_memory(arguments: argparse.Namespace) -> Iterator[Figure]:
    return _measured(arguments.socket, _nbytes(arguments.size, arguments.quick), arguments.quick)


def _copied_by() -> str:
    return "the C library" if load() else "NumPy and torch: there is no C library, which is slower"


def _nbytes(size: float | None, quick: bool) -> int:
    """Whole MiB, as the weights' rows want.

    Raises:
        InvalidArgument: too small to be cut into tensors, or more than this machine has room for.
    """
    gib = size if size is not None else (1 / 16 if quick else 1.0)
    nbytes = round(gib * GIB / MIB) * MIB
    if nbytes < 16 * MIB:
        raise InvalidArgument(f"--size {gib:g}: at least 0.016 GiB")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if nbytes * COPIES > available:
        raise InvalidArgument(
            f"--size {gib:g}: {nbytes * COPIES / GIB:.1f} GiB of memory are needed and {available / GIB:.1f} available"
        )
    return nbytes


def _measured(socket: str | None, nbytes: int, quick: bool) -> Iterator[Figure]:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    _say(f"measuring this machine's limits, with {nbytes / GIB:.3g} GiB")
    yield from _copies(nbytes, rounds)
    yield from _fresh_memory(nbytes)
    trips = limits.round_trips(QUICK_CONTROL_ROUNDS if quick else CONTROL_ROUNDS)
    yield _trip(trips)
    with (
        _daemon(socket) as path,
        pair(path, nbytes) as sides,
    ):
        for part in (1,) if quick else (64, 8, 1):
            yield _hand_over(sides, nbytes // part, "off", rounds)
        yield _hand_over(sides, nbytes, "checksum", rounds)
        _say("measuring the control path")
        yield _control(sides, trips, QUICK_CONTROL_ROUNDS if quick else CONTROL_ROUNDS)


@contextlib.contextmanager
def _daemon(socket: str | None) -> Iterator[str]:
    """The given one, else a running one at the usual place, else one of its own."""
    from awexd_client.session import Connection, socket_path
    from awexd_transports.errors import DaemonUnavailable

    path = socket_path(socket)
    try:
        Connection(path).close()
    except DaemonUnavailable:
        if socket is not None:
            raise
        _say("no daemon runs here: starting one for this")
        with daemon() as own:
            yield own
    else:
        _say(f"asking the daemon at {path}")
        yield path


def _copies(nbytes: int, rounds: int) -> Iterator[Figure]:
    rates = limits.copy_rates(nbytes, rounds)
    best = max(rates, key=lambda count: statistics.median(rates[count]))
    for count, found in rates.items():
        low, value, high = quartiles([rate / 1e9 for rate in found])
        name = f"copy-{count}-thread{'s' if count > 1 else ''}"
        note = "the fastest plain copy here" if count == best else f"the fastest is with {best} threads"
        yield Figure(name, value, "GB/s", low=low, high=high, rounds=len(found), note=note)


def _fresh_memory(nbytes: int) -> Iterator[Figure]:
    whys = {
        "reserve": "once for each slot of a job, at register",
        "populate": "what it would cost to have a first publish touch its pages",
        "map": "once for each slot and reader",
    }
    for name, seconds in limits.fresh_memory_seconds(nbytes).items():
        yield Figure(f"shared-memory-{name}", seconds * 1e3 * GIB / nbytes, "ms/GiB", note=whys[name])


def _trip(trips: list[float]) -> Figure:
    low, value, high = quartiles(trips)
    note = f"one byte to another process and back; 99th percentile {quantile(trips, 0.99):.3f} ms"
    return Figure("round-trip", value, "ms", low=low, high=high, rounds=len(trips), note=note)


def _hand_over(sides: Pair, nbytes: int, verify: str, rounds: int) -> Figure:
    name = f"hand-over-{nbytes // MIB}-MiB" + ("-checksum" if verify == "checksum" else "")
    _say(f"measuring {name}")
    weights = Weights(TENSORS, nbytes)
    measured = measure(sides, name, weights, verify, rounds)
    found = figure(name, measured, weights, None)
    return replace(found, note=_verdict(found))


def _control(sides: Pair, trips: list[float], rounds: int) -> Figure:
    with sides.job("control", tiny(), "off") as hand_over:
        times = [hand_over(step)[0] * 1e3 for step in range(1, WARM_ROUNDS + rounds + 1)][WARM_ROUNDS:]
    low, value, high = quartiles(times)
    limit = statistics.median(trips)  # publish answers what the reader waits for
    ratio = value / limit
    p99 = quantile(times, 0.99)
    asked = "as it should be" if value <= CONTROL_MS and p99 <= CONTROL_P99_MS else BUSY
    note = f"{value:.2f} ms from publish to updated for 16 small tensors, 99th percentile {p99:.2f}: {asked}"
    more: dict[str, Any] = {"p99": p99}
    return Figure(
        "control",
        value,
        "ms",
        limit=limit,
        ratio=ratio,
        low=low,
        high=high,
        rounds=rounds,
        note=note,
        more=more,
    )


def _verdict(found: Figure) -> str:
    if found.ratio is None or found.limit is None:
        return "not measured"
    text = f"{found.ratio:.2f} times two plain copies of the same bytes"
    at_any_size = FIXED_SECONDS / found.limit
    if found.ratio <= NEAR + at_any_size:
        return f"{text}: as it should be"
    if found.ratio <= FAR + at_any_size:
        return f"{text}: {BUSY}"
    return f"{text}: far more than it should be; look for load, swapping or unlocked memory"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
