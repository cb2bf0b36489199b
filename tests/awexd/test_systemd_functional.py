from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from awexd.metaserver.config import load
from awexd.protocol import Decoder, Message, check_hello, encode, hello

UNITS = Path(__file__).parents[2] / "systemd"
EXPOSURE_BOUND = 2.0
DEADLINE = 30.0


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is missing: apt install systemd")


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Our units, with a program that exists on this machine in ExecStart=; its arguments stay."""
    folder = tmp_path / "units"
    folder.mkdir()
    for name in ("awexd.service", "awexd.socket", "awexd-metaserver.service"):
        text, count = re.subn(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", (UNITS / name).read_text())
        assert count == name.endswith(".service")
        (folder / name).write_text(text)
    return folder


@pytest.mark.systemd
@needs("systemd-analyze")
def test_units_verify_without_a_word(units: Path) -> None:
    done = _run("systemd-analyze", "verify", *sorted(units.iterdir()))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.systemd
@needs("systemd-analyze")
@pytest.mark.parametrize(
    ("key", "misspelt"), [("WatchdogSec=30", "WatchdogSecs=30"), ("PrivateTmp=yes", "PrivateTmp=perhaps")]
)
def test_verify_sees_a_misspelt_unit(units: Path, key: str, misspelt: str) -> None:
    # It exits 0 all the same, so that the test above has to look at stderr.
    service = units / "awexd.service"
    service.write_text(service.read_text().replace(key, misspelt))
    assert _run("systemd-analyze", "verify", service, units / "awexd.socket").stderr


@pytest.mark.systemd
@needs("systemd-analyze")
@pytest.mark.parametrize("name", ["awexd", "awexd-metaserver"])
def test_service_exposure_is_low(units: Path, name: str) -> None:
    done = _run("systemd-analyze", "security", "--offline=true", "--no-pager", units / f"{name}.service")
    exposure = re.search(rf"exposure level for {name}\.service: ([0-9.]+)", done.stdout)
    assert exposure, done.stderr
    assert float(exposure[1]) <= EXPOSURE_BOUND


@pytest.mark.systemd
@needs("systemd-sysusers")
def test_sysusers_creates_user_and_group(tmp_path: Path) -> None:
    done = _run("systemd-sysusers", "--dry-run", f"--root={tmp_path}", UNITS / "awexd.sysusers.conf")
    assert done.returncode == 0
    assert "Creating group 'awexd'" in done.stderr
    assert "Creating user 'awexd'" in done.stderr


def test_units_and_example_name_the_same_paths() -> None:
    service, listener = (UNITS / "awexd.service").read_text(), (UNITS / "awexd.socket").read_text()
    settings = tomllib.loads((UNITS / "awexd.toml").read_text())
    assert f"ListenStream={settings['socket']}\n" in listener
    assert f"StateDirectory={settings['state_dir'].removeprefix('/var/lib/')}\n" in service
    assert not re.search(r"(?m)^RuntimeDirectory=", service)  # it would take the socket's directory over


def test_unit_and_example_of_the_metaserver_name_the_same_paths() -> None:
    service, example = (UNITS / "awexd-metaserver.service").read_text(), UNITS / "metaserver.toml"
    settings = load({}, {}, str(example))
    assert f"StateDirectory={settings.state_dir.name}\n" in service
    assert str(settings.state_dir.parent) == "/var/lib"
    assert f"--config /etc/awexd/{example.name}\n" in service


# The daemon itself, as systemd starts it.


def _serve(path: Path, state: Path) -> list[str]:
    return [sys.executable, "-m", "awexd", "serve", "--socket", str(path), "--state-dir", str(state)]


@contextmanager
def _running(command: list[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
    with ExitStack() as stack:
        process = subprocess.Popen(command, env=os.environ | environ, stderr=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        yield process


def _check_exit(process: subprocess.Popen[str]) -> None:
    # Either is a clean exit to systemd.
    assert process.wait(DEADLINE) in (0, -signal.SIGTERM)


def _receive(connection: socket.socket, decoder: Decoder) -> Message:
    while True:
        data = connection.recv(65536)
        assert data, "the daemon closed the connection"
        for message, _ in decoder.feed(data):
            return message


def _ask_status(path: Path) -> Message:
    """The answer to one `status` request on a connection of its own."""
    decoder = Decoder()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE)
        connection.connect(str(path))
        connection.sendall(encode(hello("0")))
        check_hello(_receive(connection, decoder))
        connection.sendall(encode({"id": 1, "op": "status", "args": {}, "deadline_ms": 10_000}))
        reply = _receive(connection, decoder)
    assert reply["id"] == 1
    assert "ok" in reply, reply
    status = reply["ok"]
    assert isinstance(status, dict)
    return status


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The manager's end of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.settimeout(DEADLINE)
        end.bind(str(tmp_path / "notify"))
        yield end


def _await_field(manager: socket.socket, process: subprocess.Popen[str], field: str) -> list[str]:
    """Everything that ``process`` sent up to the message with ``field``, that one included."""
    sent: list[str] = []
    handle = os.pidfd_open(process.pid)
    try:
        while field not in sent:
            waiting: list[socket.socket | int] = [manager, handle]
            readable, _, _ = select.select(waiting, [], [], DEADLINE)
            if manager not in readable:
                process.kill()
                pytest.fail(f"no {field} after {sent}: exit status {process.wait()}, {process.communicate()[1]}")
            sent += manager.recv(65536).decode().splitlines()
    finally:
        os.close(handle)
    return sent


@pytest.mark.systemd
@needs("systemd-socket-activate")
def test_daemon_serves_the_socket_that_systemd_opened(tmp_path: Path) -> None:
    path = tmp_path / "awexd.sock"
    # It passes on nothing but what it is told to.
    variables = [f"--setenv={key}={os.environ[key]}" for key in ("PYTHONPATH",) if key in os.environ]
    activate = ["systemd-socket-activate", f"--listen={path}", "--fdname=awexd", *variables]
    with _running([*activate, *_serve(path, tmp_path / "state")]) as process:
        assert process.stderr
        assert "Listening on" in process.stderr.readline()
        opened = path.stat().st_ino
        assert _ask_status(path)  # the first connection starts the daemon, and waits in the backlog
        assert _ask_status(path)
        process.send_signal(signal.SIGTERM)
        _check_exit(process)
        assert path.stat().st_ino == opened  # the socket unit's, not the daemon's to replace or remove


def test_daemon_is_ready_when_its_socket_accepts(tmp_path: Path, manager: socket.socket) -> None:
    path = tmp_path / "awexd.sock"
    with _running(_serve(path, tmp_path / "state"), NOTIFY_SOCKET=manager.getsockname()) as process:
        before = _await_field(manager, process, "READY=1")
        assert "STOPPING=1" not in before
        assert any(field.startswith("STATUS=") for field in before)
        assert _ask_status(path)
        process.send_signal(signal.SIGTERM)
        _await_field(manager, process, "STOPPING=1")
        _check_exit(process)


def test_daemon_keeps_the_watchdog_only_from_its_own_process(tmp_path: Path, manager: socket.socket) -> None:
    path = tmp_path / "awexd.sock"
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "100000"}
    with _running(_serve(path, tmp_path / "state"), **environ) as process:
        _await_field(manager, process, "READY=1")
        for _ in range(3):
            _await_field(manager, process, "WATCHDOG=1")
        process.send_signal(signal.SIGTERM)
        _check_exit(process)
    with _running(_serve(path, tmp_path / "state"), **environ, WATCHDOG_PID="1") as process:
        _await_field(manager, process, "READY=1")
        assert _ask_status(path)
        process.send_signal(signal.SIGTERM)
        assert "WATCHDOG=1" not in _await_field(manager, process, "STOPPING=1")
        _check_exit(process)


def test_metaserver_says_when_it_serves_where_and_that_it_lives(tmp_path: Path, manager: socket.socket) -> None:
    command = [sys.executable, "-m", "awexd", "metaserver", "--port", "0", "--state-dir", str(tmp_path / "state")]
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "100000"}
    with _running(command, **environ) as process:
        told = _await_field(manager, process, "READY=1")
        told += _await_field(manager, process, "WATCHDOG=1")
        (url,) = re.findall(r"STATUS=serving (http://127\.0\.0\.1:\d+)", "\n".join(told))
        assert urllib.request.urlopen(f"{url}/healthz", timeout=DEADLINE).status == 200
        process.send_signal(signal.SIGTERM)
        _await_field(manager, process, "STOPPING=1")
        assert process.wait(DEADLINE) == -signal.SIGTERM
