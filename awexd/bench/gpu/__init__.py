"""Hand-overs of weights on one GPU, as figures: a trainer's and an engine's process, next to the machine's own limits.

Everything also runs without a GPU, where a test's driver plays one over shared host memory (``devices.Played``).
"""

from __future__ import annotations
