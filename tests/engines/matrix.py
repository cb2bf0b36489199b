"""Lines of docs/support-matrix.md, as tests declare them and as they passed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "support-matrix.md"
WRITE = "AWEXD_SUPPORT_MATRIX"
"""In the environment: the document is to be written anew."""
LAST = "test_support_matrix_is_what_has_passed"
HEAD = """# Support matrix

Written by `make support-matrix` from tests that ran and passed, on CPUs. Each compares every tensor, or what it is said
to compare, with what is named. `hf` is a plain module or its state dict. What is not here was not run.

| model | trainer | engine | compared with |
| --- | --- | --- | --- |
"""


class Line(NamedTuple):
    """One line; ``trainer`` and ``engine`` with their parallelism."""

    model: str
    trainer: str
    engine: str
    checked: str


def line(*values: object, model: str, trainer: str, engine: str, checked: str) -> Any:
    """Parameters of a test that shows a line, if it passes."""
    return pytest.param(*values, marks=pytest.mark.matrix(model=model, trainer=trainer, engine=engine, checked=checked))


@dataclass
class Results:
    """What the tests of this run declare, and which of them have passed so far."""

    declared: dict[str, Sequence[Line]] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)

    def declare(self, test: str, lines: Sequence[Line]) -> None:
        if lines:
            self.declared[test] = lines

    @property
    def lines(self) -> set[Line]:
        """Those whose every test has passed."""
        failed = {line for test, lines in self.declared.items() if test not in self.passed for line in lines}
        return {line for lines in self.declared.values() for line in lines} - failed


def document(lines: Iterable[Line]) -> str:
    rows = sorted(lines, key=lambda line: (line.trainer, line.engine, line.model, line.checked))
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in rows)
