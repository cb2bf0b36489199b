from __future__ import annotations

import os

from tests.engines.matrix import DOCUMENT, WRITE, Line, Results, document

A, B = Line("a", "hf", "vllm TP1", "its own loader"), Line("b", "hf", "vllm TP1", "its own loader")


def test_line_counts_when_all_of_its_tests_have_passed() -> None:
    results = Results()
    results.declare("one", [A, B])
    results.declare("two", [A])
    results.declare("none", [])
    assert results.declared.keys() == {"one", "two"}
    assert results.lines == set()
    results.passed.add("one")
    assert results.lines == {B}
    results.passed.add("two")
    assert results.lines == {A, B}
    assert document(results.lines).endswith(
        "| a | hf | vllm TP1 | its own loader |\n| b | hf | vllm TP1 | its own loader |\n"
    )


def test_support_matrix_is_what_has_passed(results: Results) -> None:
    """The last test of a run. Of a run of some engines only, what passed must stand in the document."""
    if os.environ.get(WRITE):
        DOCUMENT.write_text(document(results.lines))
    told = DOCUMENT.read_text()
    known = {Line(*row.strip("| \n").split(" | ")) for row in told.splitlines()[len(document([]).splitlines()) :]}
    assert results.lines - known == set(), "run: make support-matrix"
    assert told == document(known)
    declared = {line for lines in results.declared.values() for line in lines}
    if known <= declared:  # a run of all
        assert known == results.lines, "run: make support-matrix"
