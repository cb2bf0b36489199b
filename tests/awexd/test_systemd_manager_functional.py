"""Our units under a real service manager, PID 1 of namespaces of its own: sandbox, access, restart and watchdog."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEMD = "/usr/lib/systemd/systemd"
DEADLINE = 60.0
PYTHON = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
TOOLS = ("unshare", "nsenter", "setpriv", "systemctl", "systemd-sysusers")

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for namespaces: sudo make test PYTEST_ARGS='-m systemd'"),
    pytest.mark.skipif(
        not os.path.exists(SYSTEMD) or not all(map(shutil.which, TOOLS)),
        reason="needs systemd and util-linux: apt install systemd util-linux",
    ),
]

# In a mount namespace of its own: nothing here reaches the machine. ProtectHome= hides a Python under /home or /root,
# so that it appears under /opt, where a packaged one would be.
_BOOT = r"""
set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for folder in /run /opt /var/lib; do mount -t tmpfs -o mode=0755 tmpfs $folder; done
mkdir -p /opt/python /opt/site /opt/src /opt/awexd/bin /opt/units/awexd.service.d /opt/etc
mount --bind "$BASE" /opt/python
mount --bind "$SITE" /opt/site
mount --bind "$SOURCE" /opt/src
cp -a /etc/. /opt/etc/
mount --bind /opt/etc /etc
: > /etc/machine-id
systemd-sysusers "$SOURCE/systemd/awexd.sysusers.conf"
mkdir -p /etc/awexd
sed 's/^memory_budget.*/memory_budget = "64MiB"/' "$SOURCE/systemd/awexd.toml" > /etc/awexd/awexd.toml
cat > /opt/awexd/bin/awexd <<EOF
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONHOME=/opt/python PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=/opt/src:/opt/src/client:/opt/src/transports:/opt/site
exec $PYTHON \${AWEXD_TEST_SCRIPT:--m awexd} "\$@"
EOF
chmod 755 /opt/awexd/bin/awexd
cp "$SOURCE"/systemd/awexd.service "$SOURCE"/systemd/awexd.socket /opt/units/
printf '[Service]\nStandardError=append:/run/awexd.log\nWatchdogSec=1\nTimeoutAbortSec=1\n' \
    > /opt/units/awexd.service.d/test.conf
for target in sysinit basic sockets shutdown network; do
    printf '[Unit]\nDefaultDependencies=no\n' > /opt/units/$target.target
done
printf '[Unit]\nDefaultDependencies=no\nRequires=awexd.socket\nAfter=awexd.socket\n' > /opt/units/test.target
SYSTEMD_UNIT_PATH=/opt/units container=test exec "$SYSTEMD" --system --unit=test.target --log-target=null
"""

# One `status` request; prints the daemon's process id, or why it was refused. A dying daemon may accept and be gone: as
# any client does, this one then connects once more.
_CLIENT = """
import socket
from awexd.protocol import Decoder, encode, hello

def ask():
    decoder, messages = Decoder(), []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect("/run/awexd/awexd.sock")
        connection.sendall(encode(hello("0")) + encode({"id": 1, "op": "status", "args": {}, "deadline_ms": 10_000}))
        while len(messages) < 2:
            data = connection.recv(65536)
            if not data:
                raise ConnectionError("closed by the daemon")
            messages += [message for message, _ in decoder.feed(data)]
    return messages[1]["ok"]["pid"]

try:
    print(ask())
except ConnectionError:
    print(ask())
"""


class Manager:
    """A booted service manager, by its process id outside."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", "-t", str(pid), "-m", "-p", "-u", "-i", "-n", "-C"]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._enter, *command], capture_output=True, text=True, timeout=DEADLINE, check=False)

    def out(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stderr + self.run("cat", "/run/awexd.log").stdout
        return done.stdout.strip()

    def ask(self, group: str = "awexd") -> str:
        """The daemon's process id, asked for by the user nobody in ``group``."""
        return self.out(*self.client(group))

    def client(self, group: str) -> tuple[str, ...]:
        drop = ("setpriv", "--reuid=65534", f"--regid={group}", "--clear-groups")
        return ("env", "AWEXD_TEST_SCRIPT=-c", *drop, "/bin/sh", "-c", 'exec /opt/awexd/bin/awexd "$1"', "sh", _CLIENT)


@pytest.fixture(scope="module")
def namespaces() -> list[str]:
    """The command that enters new ones; not every container's root may."""
    unshare = ["unshare", "-m", "-p", "-u", "-i", "-n", "-C", "--fork", "--kill-child"]
    mounts = "mount --make-rprivate / && mount -t proc proc /proc && mount -t cgroup2 cgroup2 /sys/fs/cgroup"
    done = subprocess.run([*unshare, "sh", "-c", mounts], capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        pytest.skip(f"this root may not make namespaces ({done.stderr.strip()}): run it with CAP_SYS_ADMIN")
    return unshare


@pytest.fixture
def manager(tmp_path: Path, namespaces: list[str]) -> Iterator[Manager]:
    variables = {
        "BASE": sys.base_prefix,
        "SITE": sysconfig.get_path("purelib"),
        "SOURCE": str(ROOT),
        "PYTHON": PYTHON,
        "SYSTEMD": SYSTEMD,
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
    }
    boot = [*namespaces, "bash", "-c", _BOOT]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, (tmp_path / "boot.log").open("w") as log:
        ready.bind(variables["NOTIFY_SOCKET"])
        ready.settimeout(DEADLINE)
        with subprocess.Popen(boot, env=os.environ | variables, stdout=log, stderr=log) as process:
            try:
                _await_boot(ready, process, tmp_path / "boot.log")
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                yield Manager(int(children))
            finally:
                process.kill()


def _await_boot(ready: socket.socket, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the manager says that it has started, as it does to whoever runs it in a container."""
    handle = os.pidfd_open(process.pid)
    try:
        said: list[bytes] = []
        while b"READY=1" not in said:
            waiting: list[socket.socket | int] = [ready, handle]
            readable, _, _ = select.select(waiting, [], [], DEADLINE)
            if ready not in readable:
                pytest.fail(f"the manager did not start, exit status {process.poll()}: {log.read_text()}")
            said += ready.recv(65536).splitlines()
    finally:
        os.close(handle)


def test_first_connection_starts_the_service_in_its_sandbox(manager: Manager) -> None:
    assert manager.out("systemctl", "show", "-P", "ActiveState", "awexd.service") == "inactive"
    pid = manager.ask()
    assert manager.out("systemctl", "show", "-P", "MainPID", "awexd.service") == pid
    assert manager.out("systemctl", "show", "-P", "StatusText", "awexd.service")
    assert manager.out("ps", "-o", "user=", "-p", pid) == "awexd"
    assert manager.out("stat", "-c", "%U:%G %a", "/run/awexd/awexd.sock", "/run/awexd", "/var/lib/awexd") == (
        "root:awexd 660\nroot:root 755\nawexd:awexd 700"
    )


def test_only_the_group_may_connect(manager: Manager) -> None:
    assert manager.ask("awexd")
    refused = manager.run(*manager.client("65534"))
    assert refused.returncode != 0
    assert "PermissionError" in refused.stderr


def test_killed_daemon_comes_back_while_clients_wait(manager: Manager) -> None:
    first = manager.ask()
    manager.out("kill", "-KILL", first)
    assert manager.ask() != first
    assert manager.out("systemctl", "show", "-P", "NRestarts", "awexd.service") == "1"


def test_blocked_daemon_is_replaced_by_the_watchdog(manager: Manager) -> None:
    first = manager.ask()
    manager.out("kill", "-STOP", first)
    assert manager.ask() != first


def test_stopped_daemon_leaves_the_socket_that_starts_it_again(manager: Manager) -> None:
    first = manager.ask()
    inode = manager.out("stat", "-c", "%i", "/run/awexd/awexd.sock")
    manager.out("systemctl", "stop", "awexd.service")
    assert manager.out("systemctl", "show", "-P", "Result", "awexd.service") == "success"
    assert manager.out("stat", "-c", "%i", "/run/awexd/awexd.sock") == inode
    assert manager.ask() != first
