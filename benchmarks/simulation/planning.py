"""The real planner on those jobs' manifests, each part of it in a fresh process that has only the encoded bodies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from awexd_transports.layout import Manifest
from awexd_transports.plan import plan
from awexd_transports.share import share
from benchmarks.simulation.needs import needs_of

PIECE_BYTES = 32 << 20


class Planned(NamedTuple):
    """Seconds of one rank, or of one daemon, decoding included, by what is done."""

    writer: float
    reader: float
    node: float


class Bodies(NamedTuple):
    """Bytes of manifests that one rank must have: all ranks' as registered to share out, all segments' to read."""

    writer: int
    reader: int


def bodies_of(trainer: Sequence[Manifest], segments: Sequence[Manifest], workers: Sequence[Manifest]) -> Bodies:
    """Each distinct one once, with the rank's own."""
    own = max(len(each.encoded) for each in segments), max(len(each.encoded) for each in workers)
    return Bodies(_distinct(trainer) + own[0], _distinct(segments) + own[1])


def _distinct(manifests: Sequence[Manifest]) -> int:
    return sum(len(body) for body in {each.encoded for each in manifests})


def measure(
    folder: Path,
    command: Sequence[str],
    trainer: Sequence[Manifest],
    segments: Sequence[Manifest],
    workers: Sequence[Manifest],
) -> Planned:
    """Writes the bodies to ``folder``, and has ``command`` call :func:`child` with what is to be done.

    Args:
        workers: of one node.
    """
    for name, manifests in (("trainer", trainer), ("segments", segments), ("workers", workers)):
        _encode(folder / name, manifests)
    return Planned(*(_process([*command, what, str(folder)]) for what in Planned._fields))


def child(what: str, folder: Path) -> float:
    """Seconds from encoded bodies to the result."""
    started = time.perf_counter()
    CHILDREN[what](folder)
    return time.perf_counter() - started


def _writer(folder: Path) -> None:
    share(_decoded(folder / "trainer"))[0]  # a rank makes its own segment's alone


def _reader(folder: Path) -> None:
    worker = _decoded(folder / "workers")[0]
    made = plan(_decoded(folder / "segments"), [worker], partial=True)
    if made.nbytes != worker.nbytes:
        raise SystemExit(f"the plan moves {made.nbytes} bytes; the worker holds {worker.nbytes}")


def _node(folder: Path) -> None:
    workers = _decoded(folder / "workers")
    needs = needs_of(_decoded(folder / "segments"), workers, PIECE_BYTES)
    wanted = sum(worker.nbytes for worker in workers)
    if abs(needs.of_workers.sum() - wanted) > len(needs) * len(workers):
        raise SystemExit(f"a node's pieces hold {needs.of_workers.sum():.0f} bytes of its workers' {wanted}")


CHILDREN: dict[str, Callable[[Path], None]] = {"writer": _writer, "reader": _reader, "node": _node}


def _encode(folder: Path, manifests: Sequence[Manifest]) -> None:
    folder.mkdir(parents=True)
    bodies: dict[bytes, int] = {}
    numbers = [bodies.setdefault(manifest.encoded, len(bodies)) for manifest in manifests]
    for body, number in bodies.items():
        (folder / str(number)).write_bytes(body)
    (folder / "index.json").write_text(json.dumps(numbers))


def _decoded(folder: Path) -> list[Manifest]:
    numbers: list[int] = json.loads((folder / "index.json").read_bytes())
    known = [Manifest.decode((folder / str(number)).read_bytes()) for number in range(max(numbers) + 1)]
    return [known[number] for number in numbers]


def _process(command: Sequence[str]) -> float:
    return float(subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=True).stdout)
