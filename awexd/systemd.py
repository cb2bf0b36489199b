"""What systemd and the daemon tell each other: readiness, the watchdog, and an inherited listening socket.

The three protocols are stable and small: sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3). Outside systemd
their variables are unset and everything here does nothing. The environment is always passed in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, MutableMapping

from awexd_transports.errors import InvalidArgument

logger = logging.getLogger(__name__)

_FIRST_LISTEN_FD = 3
_LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class Notifier:
    """Sends this service's state to the manager named by ``NOTIFY_SOCKET``; does nothing where that is unset.

    A message never blocks and never raises: a manager that is busy must not stop the daemon. What could not be sent
    goes out with the next message.

    Raises:
        InvalidArgument: ``NOTIFY_SOCKET`` is neither an absolute path nor an abstract name ("@...").
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        if name and name[0] not in "/@":
            raise InvalidArgument(
                f"NOTIFY_SOCKET is {name!r}: want an absolute path or an abstract name that starts with @"
            )
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._unsent: dict[str, str] = {}

    def ready(self, status: str = "") -> None:
        """The socket accepts and the held versions are checked."""
        self._send({"READY": "1", "STATUS": status} if status else {"READY": "1"})

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send({"STATUS": text})

    def stopping(self) -> None:
        """Shutdown has begun."""
        self._send({"STOPPING": "1"})

    def watchdog(self) -> None:
        """The loop is alive."""
        self._send({"WATCHDOG": "1"})

    def _send(self, fields: Mapping[str, str]) -> None:
        if not self._address:
            return
        # A line break would start another assignment.
        self._unsent |= {key: " ".join(value.split()) for key, value in fields.items()}
        message = "\n".join(f"{key}={value}" for key, value in self._unsent.items())
        # A socket for each message: nothing to close, and a manager that bound its socket anew is found.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as datagram:
            try:
                datagram.sendto(message.encode(errors="replace"), self._address)
            except OSError as error:
                logger.warning("the service manager did not take %s: %s", ", ".join(self._unsent), error)
            else:
                self._unsent.clear()


def watchdog_interval(environ: Mapping[str, str], pid: int) -> float | None:
    """Seconds between two pings: half of what the manager allows. None: no watchdog, or not for process ``pid``.

    Raises:
        InvalidArgument: ``WATCHDOG_USEC`` is not a positive number, or ``WATCHDOG_PID`` is no number.
    """
    if not environ.get("WATCHDOG_USEC"):
        return None
    if environ.get("WATCHDOG_PID") and _number(environ, "WATCHDOG_PID") != pid:
        return None
    microseconds = _number(environ, "WATCHDOG_USEC")
    if microseconds == 0:
        raise InvalidArgument("WATCHDOG_USEC is 0: want a positive number of microseconds")
    return microseconds / 2e6


async def keep_watchdog(notifier: Notifier, interval: float) -> None:
    """Pings every ``interval`` seconds until cancelled; on the daemon's own loop, so that a blocked loop is caught."""
    while True:
        notifier.watchdog()
        await asyncio.sleep(interval)


def inherited_socket(environ: MutableMapping[str, str], name: str = "awexd") -> socket.socket | None:
    """The listening Unix socket that systemd opened for this process under ``name``, or None where it opened none.

    The caller owns the socket. Every inherited fd is made close-on-exec, and the ``LISTEN_*`` variables are removed
    from ``environ``, so that no child takes them for its own. A single fd without a name is accepted.

    Raises:
        InvalidArgument: the variables contradict each other, no fd or several have that name, or the one that has it
            is not a listening Unix stream socket.
    """
    variables = {key: environ.pop(key) for key in _LISTEN_VARIABLES if key in environ}
    if not variables.get("LISTEN_FDS") or not variables.get("LISTEN_PID"):
        return None
    if _number(variables, "LISTEN_PID") != os.getpid():
        return None
    fds = range(_FIRST_LISTEN_FD, _FIRST_LISTEN_FD + _number(variables, "LISTEN_FDS"))
    _close_on_exec(fds)
    if not fds:
        return None
    names = _fd_names(variables, len(fds), name)
    if names.count(name) != 1:
        raise InvalidArgument(
            f"systemd passed sockets named {', '.join(names)}: want one named {name} (FileDescriptorName={name})"
        )
    if len(fds) > 1:
        logger.warning("systemd passed more sockets than %s, and nobody accepts on them: %s", name, ", ".join(names))
    return _listening_socket(fds[names.index(name)], name)


def _number(environ: Mapping[str, str], key: str) -> int:
    text = environ[key]
    # isdecimal alone takes other scripts' digits, int alone takes signs, blanks and underscores.
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument(f"{key} is {text!r}: want a number")
    return int(text)


def _close_on_exec(fds: range) -> None:
    for fd in fds:
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            raise InvalidArgument(f"LISTEN_FDS counts {len(fds)} fds, but fd {fd} is not open") from error


def _fd_names(variables: Mapping[str, str], count: int, default: str) -> list[str]:
    if "LISTEN_FDNAMES" not in variables and count == 1:
        return [default]
    names = variables.get("LISTEN_FDNAMES", "").split(":")
    if len(names) != count:
        raise InvalidArgument(f"LISTEN_FDNAMES has {len(names)} names for {count} fds")
    return names


def _listening_socket(fd: int, name: str) -> socket.socket:
    try:
        inherited = socket.socket(fileno=fd)
    except OSError as error:
        raise InvalidArgument(f"fd {fd}, passed as {name}, is not a socket") from error
    if inherited.family != socket.AF_UNIX or inherited.type != socket.SOCK_STREAM:
        inherited.close()
        raise InvalidArgument(f"the socket passed as {name} is not a Unix stream socket (ListenStream= with a path)")
    if not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        inherited.close()
        raise InvalidArgument(f"the socket passed as {name} does not listen: Accept=no is needed")
    return inherited
