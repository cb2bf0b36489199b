"""The table of which test shows which kind of fault names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"\| (\d[\d, ]*) \| (.+) \|")
FILE_OR_TEST = re.compile(r"([\w/]+\.py)|`(?:\w+::)?(test_\w+?)(?:\.\.\.[^`]*)?`")


def rows() -> list[tuple[str, str]]:
    return ROW.findall((HERE / "cases.md").read_text())


def test_every_kind_has_a_row() -> None:
    assert [int(number) for numbers, _ in rows() for number in numbers.split(", ")] == list(range(1, 71))


def test_every_test_that_a_row_names_is_in_the_file_named_before_it() -> None:
    for numbers, cell in rows():
        source = ""
        for file, test in FILE_OR_TEST.findall(cell):
            if file:
                path = (HERE.parent if file.startswith("benchmarks/") else HERE) / file
                assert path.exists(), f"row {numbers}: {file}"
                source = path.read_text()
            else:
                assert f"def {test}" in source, f"row {numbers}: {test}"
