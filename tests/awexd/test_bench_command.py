from __future__ import annotations

import pytest

from awexd.bench.command import _verdict
from awexd.bench.figures import Figure


@pytest.mark.parametrize(
    ("ratio", "limit", "verdict"),
    [
        (1.1, 0.4, "as it should be"),
        (1.7, 0.4, "is this machine busy"),
        (2.5, 0.4, "far more than it should be"),
        (1.7, 0.008, "as it should be"),  # a small size: what it costs at any size counts
        (None, None, "not measured"),
    ],
)
def test_verdict_tells_near_from_far(ratio: float | None, limit: float | None, verdict: str) -> None:
    assert verdict in _verdict(Figure("hand-over", 1.0, "s", limit=limit, ratio=ratio))
