from __future__ import annotations

from awexd.events import KEPT, Events


def test_events_are_told_once_in_order() -> None:
    events = Events()
    assert events.after(0) == []
    for number in range(3):
        events.add("committed", "root/j", f"step {number}")
    assert [event["text"] for event in events.after(0)] == ["step 0", "step 1", "step 2"]
    assert [event["number"] for event in events.after(1)] == [2, 3]
    assert events.after(3) == []


def test_oldest_events_are_forgotten() -> None:
    events = Events()
    for number in range(KEPT + 10):
        events.add("committed", "root/j", f"step {number}")
    assert len(events.after(0)) == KEPT
    assert events.after(0)[0]["text"] == "step 10"
    assert len(events.after(KEPT)) == 10
