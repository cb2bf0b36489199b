from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from awexd.config import Settings, check_socket_path, default_socket, default_state_dir, load, parse_size
from awexd.metaserver.config import load as load_metaserver
from awexd_transports.errors import InvalidArgument


def toml(folder: Path, text: str) -> str:
    file = folder / "awexd.toml"
    file.write_text(text)
    return str(file)


def test_defaults_without_any_source() -> None:
    settings = load({}, {"XDG_RUNTIME_DIR": "/run/user/1000", "HOME": "/users/a"})
    assert settings == Settings(socket=settings.socket, state_dir=settings.state_dir)
    assert (settings.memory_budget, settings.lease_ttl, settings.socket_mode) == (None, 600.0, 0o660)


def test_command_line_before_environment_before_file_before_default(tmp_path: Path) -> None:
    file = toml(tmp_path, 'lease_ttl = 1\njob_ttl = 1\nlog_level = "DEBUG"\n')
    environ = {"AWEXD_LEASE_TTL": "2", "AWEXD_JOB_TTL": "2"}
    settings = load({"lease_ttl": "3", "job_ttl": None, "log_level": None}, environ, file)
    assert (settings.lease_ttl, settings.job_ttl, settings.log_level) == (3.0, 2.0, "DEBUG")
    assert settings.lock_memory is True


@pytest.mark.parametrize(
    ("arguments", "environ", "text", "named"),
    [
        ({"sokcet": "x"}, {}, "", "the command line: unknown setting 'sokcet'"),
        ({}, {"AWEXD_SOKCET": "x"}, "", "the environment: unknown setting 'sokcet'"),
        ({}, {}, "sokcet = 'x'", "awexd.toml: unknown setting 'sokcet'"),
        ({}, {}, "[server]\nsocket = 'x'", "unknown setting 'server'"),
        ({}, {}, "socket = ", "awexd.toml"),
    ],
)
def test_unknown_key_is_refused_naming_its_source_and_the_known_ones(
    tmp_path: Path, arguments: dict[str, Any], environ: dict[str, str], text: str, named: str
) -> None:
    with pytest.raises(InvalidArgument) as failure:
        load(arguments, environ, toml(tmp_path, text))
    assert named in str(failure.value)


def test_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"/none/awexd\.toml: No such file"):
        load({}, {}, "/none/awexd.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64GiB", 64 << 30),
        ("64GB", 64 << 30),
        ("64g", 64 << 30),
        ("1.5 M", 3 << 19),
        ("2TiB", 2 << 40),
        ("7b", 7),
        (4096, 4096),
    ],
)
def test_size_is_parsed(text: str | int, size: int) -> None:
    assert parse_size(text) == size


BAD: list[tuple[str, Any]] = [
    ("memory_budget", "much"),
    ("memory_budget", "-1"),
    ("memory_budget", -1),
    ("memory_budget", "1PiB"),
    ("memory_budget", ""),
    ("memory_budget", True),
    ("memory_budget", [1]),
    ("lease_ttl", "0"),
    ("lease_ttl", -5),
    ("lease_ttl", "nan"),
    ("lease_ttl", "inf"),
    ("lease_ttl", "soon"),
    ("job_ttl", ""),
    ("allow_uids", "root"),
    ("allow_uids", "1,-2"),
    ("allow_uids", [1.5]),
    ("allow_uids", 5.5),
    ("allow_gids", {"a": 1}),
    ("socket_mode", "rw"),
    ("socket_mode", "888"),
    ("socket_mode", "-1"),
    ("socket_mode", 660),  # as TOML has it without quotes: decimal, and not what was meant
    ("socket_mode", "7777"),
    ("lock_memory", "maybe"),
    ("lock_memory", 2),
    ("log_level", "LOUD"),
    ("socket", 5),
    ("socket", ""),
    ("state_dir", 5),
    ("state_dir", ""),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_value_of_another_kind_is_refused_naming_the_key(key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=key):
        load({key: value}, {})


def test_values_are_of_their_kinds(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        """
        socket = "s"
        memory_budget = "1GiB"
        allow_uids = [1000, 1001]
        allow_gids = "1002 1003,1004"
        socket_mode = "600"
        lock_memory = false
        log_level = "warning"
        """,
    )
    settings = load({}, {}, file)
    assert settings.socket == os.path.abspath("s")
    assert settings.memory_budget == 1 << 30
    assert (settings.allow_uids, settings.allow_gids) == ((1000, 1001), (1002, 1003, 1004))
    assert (settings.socket_mode, settings.lock_memory, settings.log_level) == (0o600, False, "WARNING")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load({}, {}).socket = "other"  # type: ignore[misc]


def test_path_is_measured_in_bytes() -> None:
    check_socket_path("/" + "x" * 106)
    with pytest.raises(InvalidArgument, match="108 bytes"):
        check_socket_path("/" + "ü" * 53 + "x")
    with pytest.raises(InvalidArgument, match="108 bytes"):
        load({"socket": "/" + "x" * 107}, {})


def test_state_folder_is_systemds_then_the_users() -> None:
    assert default_state_dir({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a")
    if os.geteuid() == 0:
        assert default_state_dir({"HOME": "/users/a"}) == Path("/var/lib/awexd")
        assert default_socket({"XDG_RUNTIME_DIR": "/run/user/0"}) == "/run/awexd/awexd.sock"
    else:
        assert default_state_dir({"HOME": "/users/a"}) == Path("/users/a/.local/state/awexd")
        assert default_state_dir({"XDG_STATE_HOME": "/s"}) == Path("/s/awexd")


def test_variables_of_the_other_command_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    environ = {"AWEXD_PORT": "1", "AWEXD_SOCKET": "/run/s", "AWEXD_TOKEN_FILE": "/etc/t"}
    settings = load({}, environ)
    assert (settings.socket, settings.token_file) == ("/run/s", Path("/etc/t"))
    ours = load_metaserver({}, environ)
    assert (ours.port, ours.token_file) == (1, Path("/etc/t"))
    for reads in (load, load_metaserver):
        with pytest.raises(InvalidArgument, match="unknown setting 'prot'"):
            reads({}, {"AWEXD_PROT": "1"})
        with pytest.raises(InvalidArgument, match="unknown setting"):
            reads({}, {}, toml(tmp_path, "port = 1" if reads is load else "socket = 's'"))


def test_metaserver_takes_the_command_line_before_the_environment_before_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, 'host = "a"\nport = 1\nnode_ttl = 1\n')
    settings = load_metaserver({"port": "3"}, {"AWEXD_PORT": "2", "AWEXD_HOST": "b"}, file)
    assert (settings.port, settings.host, settings.node_ttl, settings.max_connections) == (3, "b", 1.0, 8192)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metaserver", "meta:7471"),
        ("metaserver", "http://meta/path"),
        ("metaserver", "ftp://meta"),
        ("metaserver", "http://user:secret@meta"),
        ("node", "../n"),
        ("node", ""),
        ("advertise", "host"),
        ("advertise", "host:port"),
        ("listen", "7470"),
        ("listen", "host:65536"),
    ],
)
def test_a_place_in_a_cluster_that_is_none_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        load({name: value}, {})
