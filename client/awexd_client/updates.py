"""An update on its way into live tensors, and what it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from awexd_client.mappings import Mapping
from awexd_client.tables import Tables

State = Literal["empty", "ready", "dirty"]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did.

    Attributes:
        epoch, step: the version that the live tensors now hold.
        bytes: written into them.
        stage_seconds: spent before the first of them was touched (the wait for the version included).
        pause_seconds: from then until the version was confirmed; the engine must not generate meanwhile.
        transport: how the bytes came.
        workers: one result a worker, where a WeightReader made this one.
    """

    epoch: int
    step: int
    bytes: int
    stage_seconds: float
    pause_seconds: float
    transport: str
    workers: tuple[UpdateResult, ...] = ()


@dataclass(slots=True)
class Staged:
    """A version leased and checked, nothing touched yet."""

    epoch: int
    step: int
    lease: str
    tables: Tables
    mappings: tuple[Mapping, ...]
    started: float
    ready: float
