"""Simulated updates: against sums done by hand, never faster than a hop allows, every byte where it must be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_client.outgoing import SLICE
from benchmarks.simulation.hardware import GPUS, Hardware, measured
from benchmarks.simulation.hops import bounds
from benchmarks.simulation.needs import Needs
from benchmarks.simulation.update import Options, simulate
from benchmarks.simulation.waves import Waves

MIB, GIB = 1 << 20, 1 << 30
PLAIN = Hardware(
    down=50e9, up=50e9, nic=400e9, memory=4000e9, control=0.0, network=0.0, request=0.0, lateness=0.0, durable=0.0,
    piece=0.0, launch=0.0,
)  # fmt: skip


def needs_of_all(ranks: int, nbytes: int, workers: int = GPUS, piece: int = 32 * MIB) -> Needs:
    """A node that needs all of these ranks' segments, each worker as much as the others."""
    counts = nbytes // piece
    rank = np.repeat(np.arange(ranks), counts)
    worker = np.arange(len(rank)) * workers // len(rank)
    shares = np.zeros((len(rank), workers))
    shares[np.arange(len(rank)), worker] = piece
    end = np.tile((np.arange(counts) + 1) * piece, ranks)
    return Needs(rank, end, np.full(len(rank), float(piece)), shares)


def test_update_of_one_node_takes_the_sum_of_its_hops() -> None:
    needs = needs_of_all(GPUS, GIB)
    outcome = simulate(PLAIN, [GIB] * GPUS, [needs], 1)
    down, over, up = GIB / 50e9, GPUS * GIB / 400e9, GIB / 50e9
    assert outcome.committed == pytest.approx(down, rel=0.01)
    assert outcome.fetched == [pytest.approx(down + over, rel=0.01)]
    assert outcome.done == [pytest.approx(down + over + up, rel=0.02)]
    assert outcome.pauses == [pytest.approx(up, rel=0.05)]
    assert outcome.sent == outcome.received == [GPUS * GIB]
    assert outcome.memory == [pytest.approx(2 * GPUS * GIB)]
    assert outcome.relayed == [0.0]


def test_overlapped_update_takes_little_more_than_its_slowest_hop() -> None:
    needs = needs_of_all(4 * GPUS, GIB)
    segments = [GIB] * 4 * GPUS
    overlapped = simulate(PLAIN, segments, [needs], 1, Options(early=True, overlap=True))
    slowest = max(bounds(PLAIN, segments, [needs]).values())
    assert slowest <= overlapped.seconds <= 1.25 * slowest
    assert simulate(PLAIN, segments, [needs], 1).seconds > 1.8 * slowest


def test_each_barrier_left_out_saves_what_it_waits_for() -> None:
    needs, segments = needs_of_all(GPUS, GIB), [GIB] * GPUS
    with_both = simulate(PLAIN, segments, [needs], 1).seconds
    down = GIB / 50e9
    early = simulate(PLAIN, segments, [needs], 1, Options(early=True))
    assert early.fetched[0] < early.committed + GPUS * GIB / 400e9 / 2
    last = SLICE / 50e9  # is told of when it is there
    assert with_both - down <= early.seconds <= with_both - down + last + SLICE * GPUS / 400e9
    overlapped = simulate(PLAIN, segments, [needs], 1, Options(overlap=True))
    assert overlapped.seconds < with_both - 0.5 * down
    assert overlapped.pauses[0] > simulate(PLAIN, segments, [needs], 1).pauses[0] * 0.9


def test_latencies_come_on_top() -> None:
    needs = needs_of_all(GPUS, GIB)
    slow = replace(PLAIN, control=0.1, lateness=0.2, durable=0.4, request=0.01)
    before, after = (simulate(each, [GIB] * GPUS, [needs], 1).seconds for each in (PLAIN, slow))
    # control: begin, seal, a lane, here, the update, its end; the MetaServer: told once of a commit, asked 13 times.
    assert after - before == pytest.approx(0.05 * 4 + 0.1 + 0.05 + 0.2 + 0.4 + 0.01 * 12, abs=0.02)


def test_trainers_nodes_send_what_an_engines_receives_and_the_rest_is_passed_on() -> None:
    needs, model = needs_of_all(2 * GPUS, GIB), 2 * GPUS * GIB
    outcome = simulate(PLAIN, [GIB] * 2 * GPUS, [needs], 4)
    assert outcome.sent == [model, model]  # each has half of it
    assert outcome.relayed == [model, model, 0.0, 0.0]
    assert len(outcome.done) == 4
    assert outcome.received == [model] * 4


def test_no_gpu_is_written_before_all_nodes_of_its_engine_have_all() -> None:
    """One node needs four times as much as the other: the other's workers wait for it."""
    small, large = needs_of_all(GPUS, 64 * MIB), needs_of_all(GPUS, 4 * 64 * MIB)
    outcome = simulate(PLAIN, [GIB] * GPUS, [small, large], 1)
    assert len(outcome.fetched) == 2
    begun = outcome.seconds - outcome.pauses[0]
    assert begun >= max(outcome.fetched)


def test_daemons_time_for_a_piece_bounds_a_fetch() -> None:
    needs = needs_of_all(GPUS, GIB)
    outcome = simulate(replace(PLAIN, piece=1e-3), [GIB] * GPUS, [needs], 1)
    assert outcome.fetched[0] - outcome.committed >= len(needs) * 1e-3


def test_outcome_is_the_same_every_time() -> None:
    needs = needs_of_all(2 * GPUS, 256 * MIB)
    first, second = (simulate(PLAIN, [256 * MIB] * 2 * GPUS, [needs], 3) for _ in range(2))
    assert first == second


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([0.3, 1.0, 5.0]),
    st.booleans(),
    st.booleans(),
)
def test_nothing_is_faster_than_its_hops_and_no_byte_is_missing(
    trainers: int, nodes: int, engines: int, memory: float, early: bool, overlap: bool
) -> None:
    ranks = trainers * GPUS
    hardware = replace(PLAIN, memory=memory * 600e9, piece=20e-6, lateness=1e-3, request=1e-4)
    each = [needs_of_all(ranks, 128 * MIB) for _ in range(nodes)]
    segments = [128 * MIB] * ranks
    outcome = simulate(hardware, segments, each, engines, Options(early, overlap))
    assert outcome.seconds >= max(bounds(hardware, segments, each).values())
    assert outcome.received == [needs.total for _ in range(engines) for needs in each]
    assert sum(outcome.sent) + sum(outcome.relayed) == sum(outcome.received)
    assert len(outcome.done) == len(outcome.pauses) == engines


def test_needs_that_nobody_meets_are_an_error() -> None:
    needs = needs_of_all(GPUS, 64 * MIB)
    with pytest.raises(ValueError, match=r"no node has all of ranks \[8, 9, 10\]"):
        simulate(PLAIN, [GIB] * GPUS, [replace(needs, rank=needs.rank + GPUS)], 1)


def test_waves_have_every_byte_once_and_come_in_the_order_of_pieces() -> None:
    needs = needs_of_all(2 * GPUS, GIB)
    waves = Waves.of(needs, [GIB] * 2 * GPUS)
    assert [sum(nbytes) for nbytes in waves.nbytes] == [pytest.approx(one) for one in needs.of_workers]
    for worker, pieces in enumerate(waves.pieces):
        assert sum(pieces) == sum(one == worker for touched in waves.touched for one, _ in touched)
    shared = np.full_like(needs.shares, 32 * MIB)
    every = Waves.of(replace(needs, shares=shared), [GIB] * 2 * GPUS)
    assert every.pieces[0] == every.pieces[-1]
    last = [max(wave for worker, wave in touched if worker == 0) for touched in every.touched]
    assert last[: GIB // (32 * MIB)] == sorted(last[: GIB // (32 * MIB)])  # of one rank


def test_rates_are_those_of_the_results(tmp_path: Path) -> None:
    def put(name: str, **values: float) -> None:
        rows = [{"name": figure.replace("_", "-"), "value": value} for figure, value in values.items()]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))

    put("h200", host_publish=40.0, host_update_reshard=30.0)
    put("control", control_p50=2.0)
    assumed = measured(1e-4, tmp_path)
    assert (assumed.down, assumed.up, assumed.control, assumed.piece) == (40e9, 30e9, 2e-3, 1e-4)
    assert {"requests assumed", "lateness assumed", "launches assumed"} <= {*assumed.sources}
    (tmp_path / "nodes.json").write_text(
        json.dumps([{"name": "metaserver-requests", "value": 500.0}, {"name": "metaserver-lateness-p99", "value": 7.0}])
    )
    found = measured(1e-4, tmp_path)
    assert found.request == pytest.approx(1 / 500)
    assert found.lateness == pytest.approx(7e-3)
    assert "nodes.json metaserver-requests" in found.sources
    assert measured(1e-4).up > 20e9
