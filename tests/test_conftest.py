from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

# One run for all. The tests named `clean` leave nothing behind.
_TESTS = """
from __future__ import annotations

import asyncio, os, socket, subprocess, sys, threading
from pathlib import Path
import pytest

kept = []

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
    os.close(os.dup(kept[-1].stdin.fileno()))

def test_orphan(tmp_path):
    read, write = os.pipe()
    subprocess.run(["bash", "-c", "sleep 600 & echo started"], stdout=write, check=True)
    os.close(read)
    os.close(write)

def test_thread():
    gate = threading.Event()
    kept.append(gate)
    threading.Thread(target=gate.wait, name="stuck", daemon=True).start()

def test_fd():
    kept.append(socket.socket())

def test_second_fd_of_the_same_file():
    kept.append(os.open(__file__, os.O_RDONLY))

def test_shm(name="NAME"):
    Path(f"/dev/shm/{name}").touch()

async def test_task():
    kept.append(asyncio.create_task(asyncio.Event().wait()))

def test_failing_test_fails_once():
    kept.append(socket.socket())
    raise ValueError("its own failure")

@pytest.fixture
def served():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.socket(), child:
        yield
        child.kill()

def test_clean(served, tmp_path):
    worker = threading.Thread(target=int)
    worker.start()
    (tmp_path / "file").write_text("x")

def test_clean_with_a_cycle():
    cycle = [os.open(__file__, os.O_RDONLY)]
    class Closes:
        def __del__(self):
            os.close(cycle[0])
    closes = Closes()
    closes.me = closes

async def test_clean_task():
    await asyncio.create_task(asyncio.sleep(0))

def test_last():
    pass  # the session's error is counted as its own
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaks")
    name = f"awexd-{uuid.uuid4().hex}"
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest.replace("GRACE = 2.0", "GRACE = 0.5"))
    (folder / "test_leaks.py").write_text(_TESTS.replace("NAME", name))
    settings = Path(__file__).parents[1] / "pyproject.toml"
    options = ["-p", "no:cacheprovider", "-rA", "--color=no", "-c", str(settings), "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    finally:
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)
    return done.stdout.replace(name, "NAME") + done.stderr


@pytest.mark.parametrize(
    ("test", "left"),
    [
        ("process", r"left behind: process \d+ \(.*input\(\)"),
        ("orphan", r"left behind: process \d+ \(sleep 600\)"),
        ("thread", "left behind: thread stuck"),
        ("fd", r"left behind: 1 x fd of socket:\[\d+\]"),
        ("second_fd_of_the_same_file", "left behind: 1 x fd of .*test_leaks.py"),
        ("shm", "left behind: /dev/shm/NAME"),
        ("task", r"left tasks behind: .*Event\.wait"),
    ],
)
def test_leak_is_an_error_of_its_test(report: str, test: str, left: str) -> None:
    assert re.search(rf"_ ERROR at teardown of test_{test} _+\nthe test {left}", report), report


@pytest.mark.parametrize("test", ["clean", "clean_with_a_cycle", "clean_task", "failing_test_fails_once"])
def test_clean_or_failed_test_has_no_error(report: str, test: str) -> None:
    assert f"ERROR at teardown of test_{test} _" not in report


def test_session_leak_is_an_error_at_its_end(report: str) -> None:
    assert re.search(r"_ ERROR at teardown of test_last _+\nthe session left behind: /dev/shm/NAME", report), report


def test_every_leak_was_counted_once(report: str) -> None:
    assert "1 failed, 11 passed, 8 errors" in report
