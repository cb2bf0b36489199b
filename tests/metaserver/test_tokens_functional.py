"""Who may do what: roles, token files, TLS on one side and on both."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from awexd.metaserver.tokens import ROLES, Tokens, read_tokens
from awexd_transports.errors import InvalidArgument
from tests.metaserver.servers import RUN, Client, Failed, MetaServer, document, report

TOKENS = {role: f"{role}-token-of-the-tests" for role in ROLES}


@pytest.fixture
def token_file(folder: Path) -> Path:
    path = folder / "tokens"
    path.touch(0o600)
    path.write_text("# of the tests\n\n" + "".join(f"{role}  {token}  # {role}\n" for role, token in TOKENS.items()))
    return path


@pytest.fixture
def guarded(folder: Path, token_file: Path) -> Iterator[MetaServer]:
    with MetaServer(folder, "--token-file", str(token_file)) as running:
        yield running


def test_each_role_may_do_what_the_document_says_and_no_more(guarded: MetaServer) -> None:
    for template, methods in document()["paths"].items():
        for method, found in methods.items():
            needed = found.get("x-role")
            for role in (None, *ROLES):
                allowed = needed is None or (role is not None and ROLES.index(role) >= ROLES.index(needed))
                status = _status(guarded, method, template, TOKENS[role] if role else "")
                assert (status in (401, 403)) is not allowed, (found["operationId"], role, status)
                assert allowed or status == (403 if role else 401)


def _status(server: MetaServer, method: str, template: str, token: str) -> int:
    """Of a request that fails for another reason, where it is let in."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    path = template.format(node="n", owner="a", name="b", engine="e", digest="0" * 64)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method.upper(), path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize(
    "header",
    [
        f"Basic {TOKENS['admin']}",
        f"Bearer {TOKENS['admin'][:-1]}",
        f"Bearer {TOKENS['admin']}x",
        f"Bearer x{TOKENS['admin']}",
        f"Bearer {TOKENS['admin'].upper()}",
        "Bearer",
        "Bearer ",
        "",
        f"bearer {'x' * 8000}",
    ],
)
def test_wrong_token_is_refused_and_not_shown(guarded: MetaServer, header: str) -> None:
    connection = http.client.HTTPConnection(guarded.host, guarded.port, timeout=30)
    connection.request("GET", "/v1/status", headers={"Authorization": header})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert (response.status, json.loads(body)["code"]) == (401, "access_denied")
    assert TOKENS["admin"].encode() not in body
    assert TOKENS["admin"] not in guarded.log()


def test_guarded_server_serves_by_any_name_and_says_health_to_anyone(guarded: MetaServer) -> None:
    with Client(guarded, TOKENS["node"]) as client:
        client.announce("n0")
        assert client.call("report", report(), node="n0", job="a/b") == {"refused": [], "home": None}
    with Client(guarded) as client:
        assert client.call("healthz")["status"] == "ok"
        with pytest.raises(Failed) as failure:
            client.call("nodes")
        assert failure.value.status == 401


@pytest.mark.parametrize(
    ("text", "mode", "named"),
    [
        ("node aaaaaaaaaaaaaaaa\n", 0o640, "chmod 600"),
        ("node aaaaaaaaaaaaaaaa\n", 0o604, "chmod 600"),
        ("node aaaaaaaaaaaaaaaa\n", 0o620, "chmod 600"),
        ("node short-secret\n", 0o600, "line 1"),
        ("root aaaaaaaaaaaaaaaa\n", 0o600, "line 1"),
        ("\nnode aaaaaaaaaaaaaaaa more\n", 0o600, "line 2"),
        ("node aaaaaaaaaaaaaaaé\n", 0o600, "line 1"),
        ("# nothing\n", 0o600, "0 tokens"),
    ],
)
def test_token_file_that_is_not_fit_is_refused_without_naming_a_token(
    tmp_path: Path, text: str, mode: int, named: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(InvalidArgument) as failure:
        read_tokens(path)
    assert named in str(failure.value)
    assert "secret" not in str(failure.value)
    assert "aaaa" not in str(failure.value)


def test_token_file_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        read_tokens(tmp_path / "none")
    with pytest.raises(InvalidArgument):
        read_tokens(tmp_path)


def test_a_token_with_two_roles_has_the_higher() -> None:
    tokens = Tokens([("admin", "t" * 16), ("reader", "t" * 16), ("node", "u" * 16)])
    assert (tokens.level("t" * 16), tokens.level("u" * 16), tokens.level("v" * 16)) == (2, 1, -1)


def _start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "awexd", "metaserver", "--port", "0", "--state-dir", str(folder / "m")]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_without_tokens_only_loopback_is_listened_on(folder: Path) -> None:
    for host in ("0.0.0.0", "::", ""):
        done = _start(folder, f"--host={host}")
        assert done.returncode == 1, host
        assert "token-file" in done.stderr or "host" in done.stderr


def test_without_tokens_a_foreign_name_is_refused(metaserver: MetaServer) -> None:
    """A web page that has its own name resolve to the loopback address cannot reach it."""
    for host, status in (
        ("localhost", 200), ("127.0.0.1:1", 200), ("[::1]", 200), ("[::1]:80", 200), ("LocalHost:7471", 200),
        ("evil.example", 421), ("evil.example:7471", 421), ("127.0.0.1.evil.example", 421), ("10.0.0.1", 421),
        ("[::1", 421), ("", 421),
    ):  # fmt: skip
        with socket.create_connection((metaserver.host, metaserver.port), timeout=30) as plain:
            plain.sendall(f"GET /v1/status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert plain.makefile("rb").readline().split()[1] == str(status).encode(), host


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tls-cert", "c"],
        ["--tls-client-ca", "c"],
        ["--tls-cert", "/none", "--tls-key", "/none"],
        ["--port", "70000"],
        ["--port", "x"],
        ["--node-ttl", "0"],
        ["--token-file", "/none"],
        ["--host", "no.such.host.invalid"],
        ["--config", "/none"],
    ],
)
def test_settings_that_cannot_be_are_refused_at_the_start(folder: Path, arguments: list[str]) -> None:
    done = _start(folder, *arguments)
    assert (done.returncode, done.stderr.count("\n"), "Traceback" in done.stderr) == (1, 1, False), done.stderr


# TLS


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates of a server and a client that it has signed; one client's that it has not."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: apt install openssl")
    folder = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for name in ("ca", "other"):
        subject = ("-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl(folder, "req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", *subject)
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        _openssl(folder, "req", *curve[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n")
        signer = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "san")
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signer, "-days", "2", "-out", f"{name}.pem")
    return folder


def _context(certificates: Path, name: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    if name:
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return context


def _tls(certificates: Path, *more: str) -> list[str]:
    return ["--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"), *more]


def test_tls_carries_requests_and_large_bodies(folder: Path, certificates: Path) -> None:
    with MetaServer(folder, *_tls(certificates)) as server:
        with Client(server, context=_context(certificates)) as client:
            client.announce("n0")
            with pytest.raises(Failed) as failure:
                client.call("keep_manifest", os.urandom(3 << 20), digest="0" * 64)
            assert failure.value.code == "protocol_error"
            client.announce("n0")
        with pytest.raises(ssl.SSLError), Client(server, context=ssl.create_default_context()) as client:
            client.call("healthz")
        with socket.create_connection((server.host, server.port), timeout=30) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in plain.recv(4096)
        with Client(server, context=_context(certificates)) as client:
            assert client.call("healthz")["status"] == "ok"


def test_mutual_tls_wants_a_certificate_of_the_authority(folder: Path, certificates: Path) -> None:
    with MetaServer(folder, *_tls(certificates, "--tls-client-ca", str(certificates / "ca.pem"))) as server:
        with Client(server, context=_context(certificates, "client")) as client:
            assert client.announce("n0", RUN)["ttl_ms"] > 0
        for name in ("", "stranger"):
            context = _context(certificates, name)
            with pytest.raises((ssl.SSLError, ConnectionError)), Client(server, context=context) as client:
                client.call("healthz")
