"""What goes by the C library, and that both sides of it mean the same."""

from __future__ import annotations

import pytest
import torch

from awexd_transports import kernel, native
from awexd_transports.copy import CopyTable, Row
from awexd_transports.view import View


def view(tensor: torch.Tensor) -> View:
    return View.of(tensor)


def test_a_job_is_as_long_as_its_structure() -> None:
    library = native.load()
    assert library is not None
    assert library.awexd_job_bytes() == kernel.JOB.itemsize


@pytest.mark.parametrize(
    ("destination", "source", "plain", "summed"),
    [
        (torch.zeros(64, 64), torch.zeros(64, 64), True, True),
        (torch.zeros(64, 64), torch.zeros(64, 128)[:, 3:67], True, True),
        (torch.zeros(64, 8), torch.zeros(64, 64)[:, :8], False, True),
        (torch.zeros(64, 64), torch.zeros(64, 64).t(), False, False),
        (torch.zeros(64, 64)[:, ::2], torch.zeros(64, 32), False, False),
        (torch.zeros(()), torch.zeros(()), False, True),
        (torch.zeros((1,) * 9), torch.zeros((1,) * 9), False, False),
    ],
)
def test_what_the_library_takes(destination: torch.Tensor, source: torch.Tensor, plain: bool, summed: bool) -> None:
    assert kernel.takes(view(destination), view(source)) is plain
    assert kernel.takes_summed(view(destination), view(source)) is summed


@pytest.mark.usefixtures("without_library")
def test_nothing_is_taken_where_there_is_no_library() -> None:
    one = view(torch.zeros(64, 64))
    assert not kernel.takes(one, one)
    assert not kernel.takes_summed(one, one)


def test_a_table_is_run_by_several_threads_at_once() -> None:
    """Each run draws its own tiles."""
    source = torch.arange(6 << 20, dtype=torch.int32)
    into = torch.zeros_like(source)
    table = CopyTable([Row(view(into), view(source))])
    works = [table._jobs.start() for _ in range(3)]
    for work in works:
        into.zero_()
        work()
        assert torch.equal(into, source)
