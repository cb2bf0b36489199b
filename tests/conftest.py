"""Fails every test that leaves a process, a thread, a task, an open fd or a shared-memory entry behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import os
import re
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from awexd_transports import kernel

SHM_PREFIX = "awexd-"
GRACE = 2.0
"""Seconds that a process or thread which is already on its way out may take."""

_FAILED = pytest.StashKey[bool]()
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

# Opened once by a library, at first use, and kept on purpose.
_LIBRARY_FDS = re.compile(
    r"/dev/(u?random|null|nvidia.*|dri/.*|infiniband/.*)|/proc/.*|/sys/.*|anon_inode:\[(dma|sync)"
)
_LIBRARY_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pytest_configure() -> None:
    # A grandchild whose parent was killed becomes our child, where the check below sees it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Only where a loop runs anyway: an asynchronous autouse fixture would start one for every test.
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        names = item.fixturenames
        if finishes_its_tasks.__name__ not in names:
            names.insert(names.index(leaves_nothing_behind.__name__) + 1, finishes_its_tasks.__name__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compares processes, threads, fds and /dev/shm before and after the test and its fixtures."""
    children, threads, fds, entries = _children(), set(threading.enumerate()), _fds(), _shm_entries()
    yield
    copies = sys.modules.get("awexd_transports.copy")
    if copies is not None:
        copies.shut_down_threads()  # one pool a process, kept from copy to copy on purpose
    left = _left_children(children)  # always: a leftover process would disturb the tests that follow
    if request.node.stash.get(_FAILED, False):
        return  # its traceback keeps things alive, and it has failed already
    left += _left_threads(threads) + _left_entries(entries) + _left_fds(fds)
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def session_leaves_nothing_behind() -> Iterator[None]:
    """The same for fixtures that outlive a test: processes and /dev/shm."""
    children, entries = _children(), _shm_entries()
    yield
    left = _left_children(children) + _left_entries(entries)
    if left:
        pytest.fail("the session left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture
async def finishes_its_tasks() -> AsyncIterator[None]:
    """The runner cancels what is left of a loop in silence; this says so."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE)
    if left:
        pytest.fail(f"the test left tasks behind: {sorted(map(repr, left))}", pytrace=False)


def _children() -> set[int]:
    """Process ids of this process's children, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # the common case, in one system call
    pids: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            pids.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except FileNotFoundError:
            continue  # that thread has ended
    return pids


def _left_children(before: set[int]) -> list[str]:
    left = []
    deadline = time.monotonic() + GRACE
    for pid in sorted(_children() - before):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended = bool(select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0])
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
            if any(name in command for name in _LIBRARY_CHILDREN):
                continue
            if not ended:
                left.append(f"process {pid} ({command})")
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            _reap(pid)
        finally:
            os.close(handle)
    return left


def _reap(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED)
    except ChildProcessError:
        return  # somebody else did


def _left_threads(before: set[threading.Thread]) -> list[str]:
    left = []
    deadline = time.monotonic() + GRACE
    for thread in set(threading.enumerate()) - before:
        # A native pool's thread (torch's autograd) that once ran Python; and tqdm's, one in a process.
        if isinstance(thread, threading._DummyThread) or type(thread).__module__.startswith("tqdm."):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(f"thread {thread.name}")
    return left


def _fds() -> Counter[str]:
    targets: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets[os.readlink(f"/proc/self/fd/{fd}")] += 1
        except FileNotFoundError:
            continue  # the listing's own fd
    return targets


def _left_fds(before: Counter[str]) -> list[str]:
    if not _new_fds(before):
        return []
    gc.collect()  # an unreachable cycle is no leak; too slow to run for every test
    return [f"{count} x fd of {target}" for target, count in sorted(_new_fds(before).items())]


def _new_fds(before: Counter[str]) -> dict[str, int]:
    return {target: count for target, count in (_fds() - before).items() if not _LIBRARY_FDS.match(target)}


def _shm_entries() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(SHM_PREFIX)}


def _left_entries(before: set[str]) -> list[str]:
    left = _shm_entries() - before
    deadline = time.monotonic() + GRACE
    while left:
        left -= _entries_of_others(left)
        left &= _shm_entries()
        if time.monotonic() >= deadline:
            break
        select.select([], [], [], 0.02)  # another suite's daemon may have been killed a moment ago
    return [f"/dev/shm/{name}" for name in sorted(left)]


def _entries_of_others(names: set[str]) -> set[str]:
    """Those of ``names`` that a live process other than this one has open or mapped: another daemon on this machine."""
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            found |= {name for name in names if f"/dev/shm/{name}" in _files_of(process)}
    return found


def _files_of(process: Path) -> set[str]:
    files = set()
    try:
        for line in (process / "maps").read_text(errors="replace").splitlines():
            files.add(line.split(maxsplit=5)[-1])
        for fd in (process / "fd").iterdir():
            files.add(os.readlink(fd))
    except OSError:
        return files  # it has ended, or belongs to another user
    return files


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go by torch and NumPy, as where no compiler was at hand."""
    monkeypatch.setattr(kernel, "load", lambda: None)


@pytest.fixture(params=["library", "tiles"])
def each_way(request: pytest.FixtureRequest) -> str:
    """By the library, and without it."""
    if request.param == "tiles":
        request.getfixturevalue("without_library")
    return str(request.param)
