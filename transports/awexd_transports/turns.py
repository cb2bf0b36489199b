"""In which order ranks take their turns, where each has a share of what goes on."""

from __future__ import annotations

_BITS = 32


def turn(rank: int) -> int:
    """Ranks sorted by this are in bit-reversed order: however they are spread over nodes, in runs or dealt out, the
    first so many of them are spread as all are. What nodes send at once then comes from each of them alike.
    """
    return int(f"{rank:0{_BITS}b}"[::-1], 2)
