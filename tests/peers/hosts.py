"""Hosts of their own, as far as the network goes: namespaces joined by veth and a bridge; links cut and slowed."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

NETWORK = "10.77.31"
HARMS = ("cut", "loss")
LOSS, DELAY = 0.3, 0.2
"""Of a link that is harmed so; seconds."""
_numbers = itertools.count()


def _run(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=20, check=False)


def may() -> bool:
    name = f"awexd-{os.getpid()}-probe"
    made = os.geteuid() == 0 and _may_run("ip", "netns", "add", name)
    return made and _may_run("ip", "netns", "del", name)


def _may_run(*command: str) -> bool:
    try:
        return _run(*command).returncode == 0
    except FileNotFoundError:
        return False


class Hosts:
    """So many namespaces on one bridge, which is in one more."""

    def __init__(self, count: int) -> None:
        stem = f"awexd-{os.getpid()}-{next(_numbers)}"
        self._hub = f"{stem}-hub"
        self.names = [f"{stem}-{number}" for number in range(count)]
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for name in (self._hub, *self.names):
            self._do("ip", "netns", "add", name)
        self._in(self._hub, "ip link add name br0 type bridge")
        self._in(self._hub, "ip link set br0 up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._do(*f"ip link add eth netns {name} type veth peer name v{number} netns {self._hub}".split())
            self._in(self._hub, f"ip link set v{number} master br0 up")
            self._in(name, f"ip addr add {address}/24 dev eth")
            self._in(name, "ip link set eth up")
            self._in(name, "ip link set lo up")

    def __exit__(self, *failure: object) -> None:
        for name in (self._hub, *self.names):
            _run("ip", "netns", "del", name)

    def wrapper(self, number: int) -> Sequence[str]:
        return ("ip", "netns", "exec", self.names[number])

    def cut(self, number: int) -> None:
        self._in(self._hub, f"ip link set v{number} down")

    def join(self, number: int) -> None:
        self._in(self._hub, f"ip link set v{number} up")

    @contextlib.contextmanager
    def harmed(self, number: int, harm: str) -> Iterator[None]:
        """That host's link is cut, or loses much of what the host sends, and delivers the rest late."""
        with contextlib.ExitStack() as stack:
            if harm == "cut":
                self.cut(number)
                stack.callback(self.join, number)
            elif self.queue(number, f"netem loss {LOSS:.0%} delay {DELAY * 1000:g}ms"):
                stack.callback(self._in, self.names[number], "tc qdisc del dev eth root")
            else:
                stack.enter_context(self._lossy(number))
            yield

    @contextlib.contextmanager
    def _lossy(self, number: int) -> Iterator[None]:
        python = (sys.executable, "-m", "tests.peers.lossy")
        self._in(self._hub, f"ip link set v{number} nomaster")
        self._do(*self.wrapper(number), *python, "offload", "eth", "0")
        command = [*python, "relay", f"v{number}", f"t{number}", str(LOSS), str(DELAY)]
        relay = subprocess.Popen(["ip", "netns", "exec", self._hub, *command], stdout=subprocess.PIPE)
        try:
            assert relay.stdout is not None
            with relay.stdout:
                assert relay.stdout.read(1) == b"+", "the relay did not start"
            self._in(self._hub, f"ip link set t{number} master br0 up")
            yield
        finally:
            relay.kill()
            relay.wait()
            self._do(*self.wrapper(number), *python, "offload", "eth", "1")
            self._in(self._hub, f"ip link set v{number} master br0")

    def queue(self, number: int, discipline: str) -> bool:
        """Whether what that host sends now goes by this queueing discipline."""
        command = f"tc qdisc replace dev eth root {discipline}"
        return _run(*self.wrapper(number), *command.split()).returncode == 0

    def _in(self, name: str, command: str) -> None:
        self._do("ip", "netns", "exec", name, *command.split())

    def _do(self, *command: str) -> None:
        done = _run(*command)
        assert done.returncode == 0, (command, done.stderr)
