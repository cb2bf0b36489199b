"""Pages on a NUMA node: asked for while they are made, and nothing else is changed."""

from __future__ import annotations

import ctypes
import platform

import pytest

from awexd.placement import preferring

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}[platform.machine()]


def policy() -> int:
    """This thread's, as the kernel has it: 0 is the default, 1 prefers nodes."""
    found = ctypes.c_int(-1)
    call = ctypes.CDLL(None, use_errno=True).syscall
    assert (
        call(ctypes.c_long(GET_MEMPOLICY), ctypes.byref(found), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)) == 0
    )
    return found.value


def test_node_is_preferred_meanwhile_only() -> None:
    with preferring(0):
        assert policy() == 1
    assert policy() == 0


def test_also_where_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), preferring(0):
        raise ZeroDivisionError
    assert policy() == 0


@pytest.mark.parametrize("node", [None, 1023])
def test_no_node_or_one_that_is_not_there_changes_nothing(node: int | None) -> None:
    with preferring(node):
        assert policy() == 0
    assert policy() == 0
