"""Settings of the MetaServer: command line, then ``AWEXD_*``, then the TOML file, then defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from awexd.config import METASERVER_SETTINGS, Kind, collect, default_state_dir
from awexd.config import Settings as DaemonSettings
from awexd.config import kinds as daemon_kinds
from awexd_transports.errors import InvalidArgument

DEFAULT_PORT = 7471


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The MetaServer's settings.

    Attributes:
        host, port: where it listens; port 0: any that is free, which its log and systemd's status name.
        state_dir: folder of the database of epochs and last steps.
        token_file: bearer tokens by role; None: only this machine's loopback is served.
        tls_cert, tls_key: its certificate chain and key; None: no TLS.
        tls_client_ca: certificates that callers' are to be signed by; None: callers need none.
        node_ttl: seconds after which a daemon that has not renewed is gone.
        max_connections: open at once.
        log_level: as the logging module names it.
    """

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    node_ttl: float = 15.0
    max_connections: int = 8192
    log_level: str = "INFO"


def load(arguments: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None) -> Settings:
    """The settings from all sources; ``arguments`` are those given on the command line (None: not given).

    Raises:
        InvalidArgument: an unknown key, a value that is not of its kind, or TLS files that do not go together.
    """
    others = {field.name for field in fields(DaemonSettings)}
    values = {"state_dir": default_state_dir(environ)} | collect(_KINDS, arguments, environ, file, others)
    settings = Settings(**values)
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise InvalidArgument("tls_cert and tls_key go together")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise InvalidArgument("tls_client_ca needs tls_cert and tls_key")
    return settings


def _host(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable():
        raise ValueError("a host name or an address")
    return value


def _whole(low: int, high: int) -> Kind:
    def check(value: Any) -> int:
        number = int(value) if isinstance(value, str) else value
        if type(number) is not int or not low <= number <= high:
            raise ValueError(f"a number from {low} to {high}")
        return number

    return check


_DAEMONS = daemon_kinds()
_KINDS: dict[str, Kind] = {
    "host": _host,
    "port": _whole(0, 65535),
    "tls_client_ca": _DAEMONS["tls_ca"],
    "node_ttl": _DAEMONS["lease_ttl"],
    "max_connections": _whole(1, 1 << 20),
    **{name: _DAEMONS[name] for name in ("state_dir", "token_file", "tls_cert", "tls_key", "log_level")},
}

if set(_KINDS) != {field.name for field in fields(Settings)} or not set(_KINDS) >= METASERVER_SETTINGS:
    raise RuntimeError("every setting needs a kind")
