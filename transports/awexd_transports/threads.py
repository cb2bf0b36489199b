"""How many threads pay for copies in host memory, and the shared threads that draw work from one queue."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from awexd_transports.errors import InvalidArgument

MAX_THREADS = 64
MOST_USEFUL = 8
"""More do not make one socket's memory faster."""

T = TypeVar("T")


def usable_cpus() -> int:
    """The CPUs that this process may run on, or its control group's quota of CPU time where that is less."""
    return max(1, min(len(os.sched_getaffinity(0)), cpu_quota() or MAX_THREADS * 1024))


def default_threads(sharing: int = 1, most: int = MOST_USEFUL) -> int:
    """This process's share of the usable CPUs, at least 1, at most ``most``.

    The machine's load is not asked: with 8 other runnable threads on 2 CPUs, one thread took 1.4 times as long as two
    for the same copies, and as many threads as CPUs slow nobody more than their fair share of time does.

    Args:
        sharing: processes of this node that copy at the same time, this one included, such as the ranks of a trainer.
    """
    return max(1, min(usable_cpus() // max(1, sharing), most))


@lru_cache(maxsize=1)
def cpu_quota(root: Path = Path("/")) -> int | None:
    """Whole CPUs (rounded up) that this process's control groups grant, read once; None: no quota, or none readable."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _quotas(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            found += _quotas(root / "sys/fs/cgroup/cpu", path, _quota_v1)
    return max(1, math.ceil(min(found))) if found else None


def _quotas(mounted: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """The quotas of a group and of all that contain it; a container may see its own group as the root."""
    group = mounted / path.strip("/")
    groups = [group, *(above for above in group.parents if above.is_relative_to(mounted))]
    return [quota for at in groups if (quota := read(at)) is not None]


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return None if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def spread(items: Iterable[T], work: Callable[[T], None], threads: int) -> None:
    """``work`` on every item, by up to so many threads, this one included; raises what a call of it raised.

    However it ends, no other thread is at work any more: the caller may unmap what they worked on.

    Raises:
        InvalidArgument: less than one thread.
    """
    if threads < 1:
        raise InvalidArgument(f"threads must be at least 1, not {threads}")
    queue = deque(items)
    others = _submit(min(threads, MAX_THREADS, len(queue)) - 1, queue, work)
    try:
        _drain(queue, work)
    finally:
        queue.clear()
        wait([other for other in others if not other.cancel()])
    for other in others:
        if not other.cancelled():
            other.result()


def shut_down_threads() -> None:
    """End the shared threads once they are idle; the next large copy starts them again."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.shutdown()


_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _forget_threads() -> None:
    """In a forked child: its parent's threads do not exist here, and the lock may have been held."""
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


os.register_at_fork(after_in_child=_forget_threads)


def _submit(count: int, queue: deque[T], work: Callable[[T], None]) -> list[Future[None]]:
    global _pool
    others: list[Future[None]] = []
    if count < 1:
        return others
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="awexd-copy")
        try:
            others += [_pool.submit(_drain, queue, work) for _ in range(count)]
        except RuntimeError:  # the interpreter is ending: no new threads, so the caller does all
            return others
    return others


def _drain(queue: deque[T], work: Callable[[T], None]) -> None:
    while True:
        try:
            item = queue.popleft()
        except IndexError:
            return
        work(item)
