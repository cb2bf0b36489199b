"""``awexctl bench --gpu``: this machine's first GPU at its best, awexd against it, a line of verdict on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from awexd.bench.figures import Figure, quartiles
from awexd.bench.gpu.devices import devices
from awexd.bench.gpu.measure import HALVES, direct, host_rounds, rate_figure
from awexd.bench.gpu.pair import WHOLE, Pair, Place, pair
from awexd.bench.gpu.weights import Weights
from awexd_transports.errors import InvalidArgument

GIB, MIB = 1 << 30, 1 << 20
SIZE, QUICK_SIZE = 4.0, 0.25
"""GiB."""
WIDTH = 2048
ROUNDS, QUICK_ROUNDS = 7, 3
COPIES = 4
"""Of the size on the GPU at once: both processes', and two for its own limit."""
NEAR, FAR = 1.15, 1.5
"""Times the machine's limit: up to here as it should be; up to there worth a look."""


def place() -> Place:
    """This machine's first GPU.

    Raises:
        InvalidArgument: there is none.
    """
    if not devices():
        raise InvalidArgument("--gpu: no NVIDIA GPU that torch can use is here")
    return Place()


def measured(
    where: Place, socket: str, size: float | None, say: Callable[[str], None], *, quick: bool
) -> Iterator[Figure]:
    """The limits, then awexd's figures.

    Args:
        size: GiB of weights.

    Raises:
        InvalidArgument: too small to be cut into tensors, or more than the GPU has room for.
    """
    weights = Weights("rows", width=WIDTH, size=_nbytes(size, quick=quick))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with pair(where, socket) as sides:
        _check_room(sides, weights)
        name = sides.reader.ask("describe")["device"]
        say(f"measuring the limits of {name}, with {weights.nbytes / GIB:.3g} GiB")
        yield from _limits(sides, weights.nbytes, rounds)
        for name, cut, verify in (
            ("gpu-direct", WHOLE, "off"),
            ("gpu-direct-reshard", HALVES, "off"),
            ("gpu-direct-checksum", WHOLE, "checksum"),
        ):
            say(f"measuring {name}")
            yield _judged(direct(sides, name, weights, rounds, cut=cut, verify=verify))
        for suffix, cut, verify in (("", WHOLE, "off"), ("-reshard", HALVES, "off"), ("-checksum", WHOLE, "checksum")):
            say(f"measuring gpu-host{suffix}")
            with sides.job("host", weights, mode="host", verify=verify, cut=cut) as job:
                found = host_rounds(job, rounds, weights.nbytes, first=1)
            yield _judged(rate_figure(f"gpu-host-publish{suffix}", found.publish, found.down, weights))
            yield _judged(rate_figure(f"gpu-host-update{suffix}", found.update, found.up, weights))


def verdict(found: Figure) -> str:
    """Whether a figure is near the machine's limit."""
    if not found.ratio:
        return "not measured"
    times = found.ratio if found.unit == "ms" else 1 / found.ratio
    text = f"{times:.2f} times the limit's time"
    if times <= NEAR:
        return f"{text}: as it should be"
    if times <= FAR:
        return f"{text}: more than it should be; is this GPU, or this machine, busy?"
    return f"{text}: far more than it should be; is Triton there, and memory registered with CUDA (see warnings)?"


def _judged(figure: Figure) -> Figure:
    return replace(figure, note=verdict(figure))


def _nbytes(size: float | None, *, quick: bool) -> int:
    gib = size if size is not None else (QUICK_SIZE if quick else SIZE)
    nbytes = round(gib * GIB / MIB) * MIB
    if nbytes < MIB:
        raise InvalidArgument(f"--size {gib:g}: at least 0.001 GiB")
    return nbytes


def _check_room(sides: Pair, weights: Weights) -> None:
    memory = sides.reader.ask("memory")
    free, needed = memory["total"] - memory["used"], COPIES * weights.nbytes
    if needed > free:
        size = weights.nbytes / GIB
        raise InvalidArgument(
            f"--size {size:g}: {needed / GIB:.1f} GiB of GPU memory are needed and {free / GIB:.1f} free"
        )


def _limits(sides: Pair, nbytes: int, rounds: int) -> Iterator[Figure]:
    whys = {
        "flat": ("gpu-copy", "one copy within the GPU, in the engine's process"),
        "down": ("gpu-to-host", "DMA to page-locked memory, in the trainer's process"),
        "up": ("host-to-gpu", "DMA from page-locked memory, in the engine's process"),
    }
    for limit, (name, why) in whys.items():
        side = sides.writer if limit == "down" else sides.reader
        rates = [nbytes / float(side.ask(limit, nbytes=nbytes)["seconds"]) / 1e9 for _ in range(rounds + 1)][1:]
        low, value, high = quartiles(rates)
        yield Figure(name, value, "GB/s", low=low, high=high, rounds=rounds, note=why)
