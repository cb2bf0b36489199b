from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from awexd_transports import threads
from awexd_transports.errors import InvalidArgument
from awexd_transports.threads import cpu_quota, default_threads, shut_down_threads, spread, usable_cpus


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    shut_down_threads()


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {}, None),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ("0::/", {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ("0::/", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "20000 100000"}, 1),
        ("0::/a/b", {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/x", {f"sys/fs/cgroup/cpu/x/cpu.cfs_{at}_us": "200000" for at in ("quota", "period")}, 1),
        ("4:cpu,cpuacct:/x", {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1"}, None),
        ("3:memory:/x\n0::/", {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100"}, None),
        ("0::/", {"sys/fs/cgroup/cpu.max": "nonsense"}, None),
    ],
)
def test_quota_of_control_groups(tmp_path: Path, groups: str, files: dict[str, str], expected: int | None) -> None:
    cpu_quota.cache_clear()
    try:
        assert cpu_quota(machine(tmp_path, groups, files)) == expected
    finally:
        cpu_quota.cache_clear()


def test_threads_are_this_process_share_of_what_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    assert [default_threads(sharing) for sharing in (0, 1, 4, 8, 32, 64)] == [8, 8, 8, 4, 1, 1]
    monkeypatch.setattr(threads, "cpu_quota", lambda: 6)
    assert (usable_cpus(), default_threads(), default_threads(2)) == (6, 6, 3)


def test_each_item_is_done_once_by_no_more_threads_than_asked() -> None:
    met = threading.Barrier(3)
    done: list[tuple[int, int]] = []

    def work(item: int) -> None:
        if item < 3:
            met.wait(30)  # passes only if three threads are at work
        done.append((item, threading.get_ident()))

    spread(range(100), work, 3)
    assert sorted(item for item, _ in done) == list(range(100))
    assert len({thread for _, thread in done}) <= 3


def test_an_error_ends_the_work_and_is_raised() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 2:
            raise OSError("no such page")
        done.append(item)

    with pytest.raises(OSError, match="no such page"):
        spread(range(1000), work, 1)
    assert done == [0, 1]
    with pytest.raises(OSError, match="no such page"):
        spread(range(1000), work, 3)
    with pytest.raises(InvalidArgument):
        spread(range(3), work, 0)
