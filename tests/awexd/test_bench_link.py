from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator

import pytest

from awexd.bench.link import Side, SideFailed

SCRIPT = """
import os, select, signal, sys
from awexd.bench.link import serve

def several(count):
    for number in range(count):
        yield {"number": number}

def fail():
    raise ValueError("it broke")

def end():
    os._exit(3)

def hang():
    signal.pause()

def leave():
    yield {}
    select.select([int(sys.argv[-1])], [], [])
    os._exit(3)

def pid():
    return {"pid": os.getpid()}

serve(int(sys.argv[-1]), {made.__name__: made for made in (pid, several, fail, end, hang, leave)})
"""


@pytest.fixture
def side() -> Iterator[Side]:
    with Side("it", [sys.executable, "-c", SCRIPT]) as running:
        yield running


def test_answers_come_in_the_order_of_requests(side: Side) -> None:
    side.tell("several", count=2)
    side.tell("pid")
    assert [side.answer("several")["number"] for _ in range(2)] == [0, 1]
    assert side.answer("pid")["pid"] != os.getpid()


@pytest.mark.parametrize(
    ("operation", "message"), [("fail", "it, fail: ValueError: it broke"), ("end", "it ended during end")]
)
def test_failure_is_told_with_its_operation(side: Side, operation: str, message: str) -> None:
    with pytest.raises(SideFailed, match=message):
        side.ask(operation)
    with pytest.raises(SideFailed, match=r"it (has )?ended"):
        side.ask("pid")


def test_side_that_ends_with_a_request_unread(side: Side) -> None:
    side.ask("leave")
    side.tell("pid")
    with pytest.raises(SideFailed, match="it ended during pid"):
        side.answer("pid")


def test_side_that_is_killed_can_still_be_heard(side: Side) -> None:
    side.tell("several", count=1)
    assert select.select([side._socket], [], [], 20)[0], "it has answered"
    side.kill()
    assert side.answer("several") == {"number": 0}
    with pytest.raises(SideFailed, match=r"it (has )?ended"):
        side.ask("pid")


def test_side_that_hangs_is_late_and_is_ended(side: Side) -> None:
    side.tell("hang")
    with pytest.raises(SideFailed, match=r"did not answer hang in 0\.2 s"):
        side.answer("hang", timeout=0.2)
    raised = SideFailed("over")
    side.__exit__(type(raised), raised, None)  # does not wait for it
    with pytest.raises(SideFailed, match="has ended"):
        side.ask("pid")
