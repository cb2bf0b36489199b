"""In which order the members of an exchange meet. Pure.

In round k writer w sends to reader w + k, counted around the larger of the two sides: nobody has two partners in a
round. All go through the rounds in the same order, so that of all pairs that are not done, those of the earliest round
have nobody else to wait for: whatever the sizes, nothing waits in a circle, also where a send ends only when it was
received.
"""

from __future__ import annotations


def readers_of(writer: int, writers: int, readers: int) -> list[int]:
    """The readers that a writer meets, in order."""
    around = max(writers, readers)
    return [reader for k in range(around) if (reader := (writer + k) % around) < readers]


def writers_of(reader: int, writers: int, readers: int) -> list[int]:
    """The writers that a reader meets, in order."""
    around = max(writers, readers)
    return [writer for k in range(around) if (writer := (reader - k) % around) < writers]
