"""``update-1000``: many small updates, lent and through host memory in turn, and what they leave behind."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from awexd.bench.figures import Figure
from awexd.bench.gpu.daemon_state import in_use
from awexd.bench.gpu.measure import BARS
from awexd.bench.gpu.pair import Pair
from awexd.bench.gpu.weights import Weights

WARM_UPDATES = 20
COUNTED = ("used", "allocated", "reserved", "descriptors", "mappings")


def update_many(pair: Pair, weights: Weights, updates: int) -> Figure:
    """How many counters have grown: of device memory, descriptors and mappings; each one's growth beside it."""
    with (
        pair.job("lasting-direct", weights, mode="direct") as direct,
        pair.job("lasting-host", weights, mode="host") as host,
    ):
        times = []
        before: dict[str, int] = {}
        for step in range(1, WARM_UPDATES + updates + 1):
            times.append((direct, host)[step % 2].hand_over(step)[0])
            if step == WARM_UPDATES:
                direct.check(step)  # what that takes is there before anything is counted
                before = dict(_counted(pair))
        direct.check(WARM_UPDATES + updates)
        after = dict(_counted(pair))
    grown = {name: after[name] - count for name, count in before.items()}
    found = sum(growth > 0 for growth in grown.values())
    note = (
        f"counters that grew over {updates} hand-overs of {weights.nbytes / 1e6:.0f} MB: bytes of device memory (in "
        "use, torch's), descriptors and mapped segments of both processes; the daemon's descriptors, leases, "
        "sessions and bytes"
    )
    more = {"median_ms": statistics.median(times[WARM_UPDATES:]) * 1e3, **grown}
    return Figure("update-1000", found, "counters grown", bar=BARS["update-1000"], rounds=updates, more=more, note=note)


def _counted(pair: Pair) -> Iterator[tuple[str, int]]:
    for role, side in (("writer", pair.writer), ("reader", pair.reader)):
        memory = side.ask("memory")
        yield from ((f"{role}_{name}", memory[name]) for name in COUNTED)
    yield from ((f"daemon_{name}", count) for name, count in in_use(pair.socket).items())
