"""Whole jobs as they occur, small: a mixture of experts between trainers and engines, and replicas to few readers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from awexd_transports.layout import Box, Entry, Manifest, TensorSpec, body_digest
from awexd_transports.plan import plan
from awexd_transports.share import share
from tests.transports.strategies import even, manifest, one, whole

HIDDEN, WIDE = 16, 8
Cut = tuple[int, int, int]
"""Dimension, part, parts."""


def attention(layer: int, rank: int, parts: int, experts: int) -> Iterator[tuple[str, tuple[int, ...], Cut | None]]:
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", (HIDDEN,), None
    for name in ("q_proj", "k_proj", "v_proj"):
        yield prefix + f"self_attn.{name}.weight", (32, HIDDEN), (0, rank, parts)
    yield prefix + "self_attn.o_proj.weight", (HIDDEN, 32), (1, rank, parts)
    yield prefix + "self_attn.q_norm.weight", (4,), None
    yield prefix + "mlp.gate.weight", (experts, HIDDEN), None


def expert(layer: int, number: int, rank: int, parts: int) -> Iterator[tuple[str, tuple[int, ...], Cut | None]]:
    prefix = f"model.layers.{layer}.mlp.experts.{number}."
    yield prefix + "gate_proj.weight", (WIDE, HIDDEN), (0, rank, parts)
    yield prefix + "up_proj.weight", (WIDE, HIDDEN), (0, rank, parts)
    yield prefix + "down_proj.weight", (HIDDEN, WIDE), (1, rank, parts)


def made(tensors: Iterator[tuple[str, tuple[int, ...], Cut | None]]) -> Manifest:
    def entries() -> Iterator[Entry]:
        for piece, (name, shape, cut) in enumerate(tensors):
            box = whole(shape)
            if cut is not None:
                dim, rank, parts = cut
                low, high = even(shape[dim], parts)[rank]
                offset, extent = list(box.offset), list(box.shape)
                offset[dim], extent[dim] = low, high - low
                box = Box(tuple(offset), tuple(extent))
            yield Entry(TensorSpec(name, shape, "bfloat16"), box, piece)

    return Manifest.of(entries())


def trainers(layers: int, experts: int, *, tensor: int, stages: int, spread: int, ranks: int) -> list[Manifest]:
    """``tensor`` parts, ``stages`` of a pipeline, experts over ``spread`` ranks of a stage; all else is replicated."""

    def held(rank: int) -> Iterator[tuple[str, tuple[int, ...], Cut | None]]:
        stage, own = divmod(rank, ranks // stages)
        part = own % tensor
        if stage == 0:
            yield "model.embed_tokens.weight", (64, HIDDEN), (0, part, tensor)
        for layer in range(*even(layers, stages)[stage]):
            yield from attention(layer, part, tensor, experts)
            for number in range(*even(experts, spread)[own % spread]):
                yield from expert(layer, number, 0, 1)
        if stage == stages - 1:
            yield "model.norm.weight", (HIDDEN,), None
            yield "lm_head.weight", (64, HIDDEN), (0, part, tensor)

    return [made(held(rank)) for rank in range(ranks)]


def engine(layers: int, experts: int, *, tensor: int = 1, spread: int = 1) -> list[Manifest]:
    """Experts cut ``tensor`` ways, or whole and over ``spread`` ranks; the rest cut ``tensor`` ways."""

    def held(rank: int) -> Iterator[tuple[str, tuple[int, ...], Cut | None]]:
        yield "model.embed_tokens.weight", (64, HIDDEN), (0, rank % tensor, tensor)
        for layer in range(layers):
            yield from attention(layer, rank % tensor, tensor, experts)
            for number in range(*even(experts, spread)[rank % spread]):
                yield from expert(layer, number, rank % tensor, tensor)
        yield "model.norm.weight", (HIDDEN,), None
        yield "lm_head.weight", (64, HIDDEN), (0, rank % tensor, tensor)

    return [made(held(rank)) for rank in range(max(tensor, spread))]


def received(manifests: Sequence[Manifest]) -> list[Manifest]:
    """As they come from the daemon: distinct bodies once, ranks by digest."""
    bodies = {m.digest: m.encoded for m in manifests}
    decoded = {digest: Manifest.decode(body, body_digest(body)) for digest, body in bodies.items()}
    return [decoded[m.digest] for m in manifests]


def check_every_element(registered: Sequence[Manifest], destinations: Sequence[Manifest]) -> None:
    """Through numbered elements: what a trainer's segment has, and where each copy puts it."""
    segments = share(registered)
    written: set[tuple[str, tuple[int, ...]]] = set()
    for segment in segments:
        for entry in segment.entries:
            for point in product(*map(range, entry.box.offset, entry.box.end)):
                assert (entry.tensor.name, point) not in written
                written.add((entry.tensor.name, point))
    arrived: set[tuple[int, int, tuple[int, ...]]] = set()
    for copy in plan(segments, destinations).copies:
        source = segments[copy.source].entries[copy.source_entry]
        own = destinations[copy.destination].entries[copy.destination_entry]
        assert source.tensor == own.tensor
        assert source.box.intersect(copy.box) == own.box.intersect(copy.box) == copy.box
        for point in product(*map(range, copy.box.offset, copy.box.end)):
            element = copy.destination, copy.destination_entry, point
            assert element not in arrived
            arrived.add(element)
    assert len(arrived) == sum(entry.box.numel for m in destinations for entry in m.entries)


def test_a_mixture_of_experts_reaches_tensor_parallel_engines() -> None:
    """As the bar ``plan-global-moe``: TP4 PP2 EP8 on 64 ranks to engines of TP8, here of four layers."""
    registered = received(trainers(4, 16, tensor=4, stages=2, spread=8, ranks=64))
    engines = received(engine(4, 16, tensor=8) * 2)
    assert len({m.digest for m in registered}) == 16
    check_every_element(registered, engines)
    made = plan(share(registered), engines)
    assert len(made.moves) * 2 == len(made)
    given = made.traffic().nbytes.sum(axis=1)
    for stage in np.split(given, 2):
        assert stage.max() <= 1.2 * stage.mean()  # of a few kilobytes, in rows


def test_one_rank_of_a_large_job_needs_its_own_part_only() -> None:
    """As the bar ``plan-local-1t``: TP4 PP8 EP32 to engines of EP32, here of eight layers."""
    registered = received(trainers(8, 32, tensor=4, stages=4, spread=8, ranks=32))
    readers = received(engine(8, 32, spread=8))
    check_every_element(registered, readers)
    segments = share(registered)
    for rank in (0, 5):
        alone, among = plan(segments, [readers[rank]], partial=True), plan(segments, readers)
        assert list(alone.to(0).copies(rank)) == list(among.to(rank).copies(rank))
    assert share(registered)[9] == segments[9]


def test_names_of_a_job_are_spelled_once() -> None:
    """A few bytes a name, whatever the number of experts."""
    assert all(len(m.encoded) < 1500 for m in engine(24, 64, tensor=8))


@pytest.mark.parametrize(
    ("writers", "readers"),
    [(64, 8), (8, 2), (4, 5)],
    ids=["64 trainers to one TP8", "DP8 to 2", "4 replicas to 5"],
)
def test_replicas_send_evenly(writers: int, readers: int) -> None:
    """The bars of balance: the largest load over the lower bound, which is all bytes over all writers."""
    shapes = [(640, 64), (64, 640), *[(192, 64)] * 20, (64,)]
    registered = [manifest(*(one(f"w.{at}", shape) for at, shape in enumerate(shapes)))] * writers
    destinations = [
        manifest(
            *(
                one(f"w.{at}", shape, Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])))
                for at, shape in enumerate(shapes)
                for low, high in [even(shape[0], readers)[rank]]
            )
        )
        for rank in range(readers)
    ]
    given = plan(share(registered), destinations).traffic().nbytes.sum(axis=1)
    assert given.max() <= 1.05 * given.mean()


def test_sharing_thousands_of_names_among_64_ranks_takes_no_seconds() -> None:
    """Bound to show names looked at one by one (two seconds and more), not to measure."""
    shape = (64, 8)
    registered = [
        manifest(*(one(f"model.layers.{at}.w", shape, Box((low, 0), (high - low, 8))) for at in range(2500)))
        for low, high in even(64, 32)
    ] * 2
    registered = received(registered)
    started = time.monotonic()
    segments = share(registered)
    assert time.monotonic() - started < 1.5
    assert sum(len(segment) for segment in segments) == 2500 * 32
