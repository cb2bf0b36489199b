"""Settings of the daemon, read once: command line, then ``AWEXD_*``, then the TOML file, then defaults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from awexd.protocol import MAX_SOCKET_PATH_BYTES
from awexd_transports.errors import InvalidArgument

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
Kind = Callable[[Any], Any]
"""Makes a setting's value; ValueError says what is wanted."""
METASERVER_SETTINGS = frozenset({"host", "port", "tls_client_ca", "node_ttl", "max_connections"})
"""Of ``awexd metaserver`` alone: a shell may have both commands' variables."""
MAX_PORT = 65_535
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_URL = re.compile(r"https?://(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The daemon's settings.

    Attributes:
        socket: path of the Unix socket.
        state_dir: folder for what must outlive the daemon beside the segments.
        memory_budget: bytes that segments may take; None: what memory and cgroup leave.
        lease_ttl: seconds that a reader's hold on a version lasts at most.
        job_ttl: seconds after which a job that nobody uses is closed.
        allow_uids, allow_gids: who may connect, beside root and the daemon's user; both empty: who can open the socket.
        socket_mode: permission bits of a socket that the daemon makes itself.
        lock_memory: keep segments resident where the memlock limit allows.
        log_level: as the logging module names it.
        metaserver: URL of the cluster's MetaServer; None: this node is by itself.
        node: this node's name in the cluster; None: the host's.
        listen: ``host:port`` where this node serves other nodes' daemons; None: it serves none.
        advertise: ``host:port`` where those reach it; None: where it listens.
        fetch_grace: seconds that other nodes in the middle of fetching a version keep its memory once it has retired.
        token_file: of the token that the MetaServer wants.
        peer_transport: how bytes come from other nodes: "auto", "tcp" or "rdma".
        peer_tls_cert, peer_tls_key, peer_tls_ca: of TLS between daemons: this one's own certificate and key, and the
            authorities of the others'; None: their bytes are neither private nor authentic.
        tls_ca: certificates that the MetaServer's is to be signed by; tls_cert, tls_key: the daemon's own.
    """

    socket: str
    state_dir: Path
    memory_budget: int | None = None
    lease_ttl: float = 600.0
    job_ttl: float = 24 * 3600.0
    allow_uids: tuple[int, ...] = ()
    allow_gids: tuple[int, ...] = ()
    socket_mode: int = 0o660
    lock_memory: bool = True
    log_level: str = "INFO"
    metaserver: str | None = None
    node: str | None = None
    listen: str | None = None
    advertise: str | None = None
    fetch_grace: float = 10.0
    token_file: Path | None = None
    peer_transport: str = "auto"
    peer_tls_cert: Path | None = None
    peer_tls_key: Path | None = None
    peer_tls_ca: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


def default_socket(environ: Mapping[str, str]) -> str:
    """``/run/awexd/awexd.sock``; without root, or without that folder, in the user's runtime folder."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() != 0 and runtime and not os.path.exists("/run/awexd/awexd.sock"):
        return f"{runtime}/awexd.sock"
    return "/run/awexd/awexd.sock"


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """systemd's ``STATE_DIRECTORY``, ``/var/lib/awexd`` for root, else the user's state folder."""
    given = environ.get("STATE_DIRECTORY")
    if given:
        return Path(given.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/awexd")
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or "/", ".local", "state")
    return Path(base) / "awexd"


def load(arguments: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None) -> Settings:
    """The settings from all sources; ``arguments`` are those given on the command line (None: not given).

    Raises:
        InvalidArgument: an unknown key, a value that is not of its kind, or a socket path that is too long.
    """
    values: dict[str, Any] = {"socket": default_socket(environ), "state_dir": default_state_dir(environ)}
    settings = Settings(**values | collect(_KINDS, arguments, environ, file, METASERVER_SETTINGS))
    check_socket_path(settings.socket)
    return settings


def collect(
    kinds: Mapping[str, Kind],
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    file: str | None,
    others: Collection[str],
) -> dict[str, Any]:
    """Values from all sources, each made by its kind. ``others``: of another command, passed over in the environment.

    Raises:
        InvalidArgument: an unknown key, or a value that is not of its kind.
    """
    values: dict[str, Any] = {}
    inherited = {key: value for key, value in _from_environ(environ).items() if key in kinds or key not in others}
    for source, found in (
        (file or "", _from_toml(file)),
        ("the environment", inherited),
        ("the command line", {key: value for key, value in arguments.items() if value is not None}),
    ):
        for key, value in found.items():
            if key not in kinds:
                raise InvalidArgument(f"{source}: unknown setting {key!r}; known: {', '.join(sorted(kinds))}")
            try:
                values[key] = kinds[key](value)
            except (TypeError, ValueError, AttributeError) as error:
                raise InvalidArgument(f"{source}: {key} = {value!r}: {error}") from error
    return values


def check_socket_path(path: str) -> None:
    """Refuses a path that the kernel would cut.

    Raises:
        InvalidArgument: longer than a Unix socket's address.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidArgument(
            f"socket path {path} has {len(os.fsencode(path))} bytes; the kernel takes {MAX_SOCKET_PATH_BYTES}"
        )


def parse_size(text: str | int) -> int:
    """``"8GiB"``, ``"512M"`` or a number of bytes.

    Raises:
        ValueError: none of these.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if not match:
        raise ValueError("a size is a number of bytes, or with K, M, G or T")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 < seconds < 1e9:
        raise ValueError("a number of seconds above 0")
    return seconds


def _numbers(value: Any) -> tuple[int, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    numbers = tuple(int(item) if isinstance(item, str) else item for item in items)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("numbers of users or groups")
    return numbers


def _mode(value: Any) -> int:
    mode = int(value, 8) if isinstance(value, str) else value
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise ValueError('permission bits in octal, as text: "660"')
    return mode


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]


def _level(value: Any) -> str:
    level = str(value).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("DEBUG, INFO, WARNING or ERROR")
    return level


def _path(value: Any) -> Path:
    if not value:
        raise ValueError("a path")
    return Path(value).absolute()


def _matching(pattern: re.Pattern[str], wanted: str) -> Kind:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(wanted)
        return value

    return check


def _address(value: Any) -> str:
    address: str = _matching(_ADDRESS, "HOST:PORT")(value)
    if int(address.rpartition(":")[2]) > MAX_PORT:
        raise ValueError(f"a port is at most {MAX_PORT}")
    return address


_KINDS: dict[str, Kind] = {
    "socket": lambda value: str(_path(value)),
    "state_dir": _path,
    "memory_budget": parse_size,
    "lease_ttl": _seconds,
    "job_ttl": _seconds,
    "allow_uids": _numbers,
    "allow_gids": _numbers,
    "socket_mode": _mode,
    "lock_memory": _boolean,
    "log_level": _level,
    "metaserver": _matching(_URL, "http://HOST:PORT or https://HOST:PORT"),
    "node": _matching(_NODE, "letters, digits, '.', '_' and '-' (100 at most, no leading '.')"),
    "listen": _address,
    "advertise": _address,
    "fetch_grace": _seconds,
    "token_file": _path,
    "peer_transport": _matching(re.compile("auto|tcp|rdma"), "auto, tcp or rdma"),
    "peer_tls_cert": _path,
    "peer_tls_key": _path,
    "peer_tls_ca": _path,
    "tls_ca": _path,
    "tls_cert": _path,
    "tls_key": _path,
}

if set(_KINDS) != {field.name for field in fields(Settings)}:  # one list in two forms: they must agree
    raise RuntimeError("every setting needs a kind")


def kinds() -> Mapping[str, Kind]:
    """The kind of each setting, for a command that has some of the same."""
    return _KINDS


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {key: value for key, value in environ.items() if key.startswith("AWEXD_")}
    return {key.removeprefix("AWEXD_").lower(): value for key, value in found.items()}


def _from_toml(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        with open(file, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise InvalidArgument(f"configuration {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"configuration {file}: {error}") from error
