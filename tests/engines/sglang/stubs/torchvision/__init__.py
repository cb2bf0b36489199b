"""Stands in for torchvision, whose published builds need the CUDA build of torch. No test uses images."""

from __future__ import annotations

from absent import stand_in

__version__ = "0.28.0"
__getattr__ = stand_in(__name__)
