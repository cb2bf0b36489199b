"""Connections as a network has them: malformed, slow, half open, too many, too large, and a thousand that wait."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awexd.metaserver.http import MAX_HEAD_BYTES
from tests.metaserver.servers import DIGEST, RUN, Client, Failed, MetaServer, check_answer, document, report
from tests.metaserver.test_http import MALFORMED

JOB = "alice/grpo"
WATCHERS = 1000
DEADLINE = 60.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetaServer]:
    """One for all attacks: it must survive every one of them, and leak none of their connections."""
    with MetaServer(tmp_path_factory.mktemp("m"), "--node-ttl", "600") as running:
        before = len(os.listdir(f"/proc/{running.pid}/fd"))
        yield running
        end = time.monotonic() + DEADLINE
        while len(os.listdir(f"/proc/{running.pid}/fd")) > before:
            assert time.monotonic() < end, "connections are left"
            select.select([], [], [], 0.05)


@pytest.fixture
def serving(shared: MetaServer) -> Iterator[MetaServer]:
    """It, with a bystander who is served after the attack as before."""
    with Client(shared) as bystander:
        bystander.call("status")
        yield shared
        bystander.call("status")


@contextmanager
def plain(server: MetaServer) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=DEADLINE) as connection:
        yield connection


def answers(connection: socket.socket) -> list[tuple[int, dict[str, str], bytes]]:
    """All until the connection ends: status, headers and body each."""
    data, found = b"", []
    with connection.makefile("rb") as stream:
        data = stream.read()
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(headers.get("content-length", 0))
        found.append((int(first.split()[1]), headers, data[:size]))
        data = data[size:]
    return found


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_request_is_told_so_and_ends_its_connection(serving: MetaServer, what: str) -> None:
    head, status = MALFORMED[what]
    with plain(serving) as connection:
        connection.sendall(head + b"\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ((told, headers, body),) = answers(connection)
    assert (told, json.loads(body)["code"], headers["connection"]) == (status, "protocol_error", "close")


def test_requests_may_come_together_and_in_pieces(serving: MetaServer) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = json.dumps({"digests": [DIGEST]}).encode()
    two = b"POST /v1/manifests/missing HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    two += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with plain(serving) as connection:
        connection.sendall(one + two + one + two + last)
        together = [(status, body) for status, _, body in answers(connection)]
    with plain(serving) as connection:
        for byte in one + two + one + two + last:
            connection.sendall(bytes([byte]))
        assert [(status, body) for status, _, body in answers(connection)] == together
    assert [status for status, _ in together] == [200] * 5
    assert json.loads(together[1][1]) == {"missing": [DIGEST]}


@pytest.mark.parametrize(
    ("method", "path", "kind", "length", "status"),
    [
        ("PUT", f"/v1/manifests/{DIGEST}", "application/octet-stream", (64 << 20) + 1, 413),
        ("PUT", "/v1/nodes/n0", "application/json", 1 << 20, 413),
        ("GET", "/v1/status", "application/json", 1, 413),
        ("PUT", "/v1/nodes/n0", "text/plain", 2, 415),
        ("PUT", "/v1/nodes/n0", "application/x-www-form-urlencoded", 2, 415),
        ("PATCH", "/v1/nodes/n0", "application/json", 2, 405),
        ("GET", "/v1/nothing", "application/json", 0, 404),
        ("GET", "//etc/passwd", "application/json", 0, 404),
        ("GET", "/v1/nodes/../../etc", "application/json", 0, 404),
        ("GET", f"/v1/manifests/{'A' * 64}", "application/json", 0, 400),
        ("GET", "/v1/jobs/a/b%2Fc", "application/json", 0, 400),
        ("GET", "/v1/jobs/../b", "application/json", 0, 400),
        ("GET", "/v1/events?after=-1", "application/json", 0, 400),
        ("GET", "/v1/events?after=1&after=2", "application/json", 0, 400),
        ("GET", "/v1/events?timeout_ms=60001", "application/json", 0, 400),
        ("GET", "/v1/events?other=1", "application/json", 0, 400),
        ("DELETE", "/v1/nodes/n0", "application/json", 0, 400),
    ],
)
def test_what_no_route_takes_is_refused_before_its_body_is_read(
    serving: MetaServer, method: str, path: str, kind: str, length: int, status: int
) -> None:
    with plain(serving) as connection:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        )
        connection.sendall(head.encode())
        ((told, _, body),) = answers(connection)
    assert told == status
    assert set(json.loads(body)) == {"code", "message", "details"}


BODIES = {
    "not JSON": b"\x80\x04\x95pickle.",
    "nothing": b"",
    "not an object": b"[]",
    "too deep": b'{"run":' + b"[" * 20000 + b"]" * 20000 + b"}",
    "half a surrogate": b'{"run":"\\ud800aaaaaaa","address":null,"version":""}',
    "a field too many": b'{"run":"aaaaaaaa","address":null,"version":"","more":1}',
    "a field too few": b'{"run":"aaaaaaaa","address":null}',
    "a number that is true": b'{"run":true,"address":null,"version":""}',
    "a line break in a name": b'{"run":"aaaaaaaa\\n","address":null,"version":""}',
    "an address that is a path": b'{"run":"aaaaaaaa","address":"/etc/passwd","version":""}',
    "a long text": b'{"run":"aaaaaaaa","address":null,"version":"' + b"v" * 65 + b'"}',
}


@pytest.mark.parametrize("what", BODIES)
def test_body_that_is_not_as_the_document_says_is_refused_and_the_connection_goes_on(
    serving: MetaServer, what: str
) -> None:
    body = BODIES[what]
    with plain(serving) as connection:
        head = b"PUT /v1/nodes/bad HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        connection.sendall(b"GET /v1/nodes HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        (refused, _, error), (after, _, nodes) = answers(connection)
    assert (refused, after, json.loads(error)["code"]) == (400, 200, "invalid_argument")
    assert "bad" not in [node["node"] for node in json.loads(nodes)["nodes"]]


def test_a_head_without_end_is_refused(serving: MetaServer) -> None:
    with plain(serving) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (MAX_HEAD_BYTES + 16))
        ((status, _, _),) = answers(connection)
    assert status == 431


def test_expect_continue_is_answered_before_the_body(serving: MetaServer) -> None:
    with plain(serving) as connection:
        head = b"PUT /v1/manifests/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nExpect: 100-continue\r\n"
        connection.sendall(head % DIGEST.encode() + b"Connection: close\r\n\r\n")
        assert connection.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"body")
        assert [status for status, _, _ in answers(connection)] == [400]


def test_who_asks_and_goes_leaves_nothing(serving: MetaServer) -> None:
    with Client(serving) as client:
        client.announce("n0")
        client.call("report", report(engines=[_engine()]), node="n0", job=JOB)
        seq = client.call("job", job=JOB)["brief"]["seq"]
        for how in ("close", "reset", "half"):
            for path in (f"/v1/jobs/{JOB}/watch?after={seq}&timeout_ms=60000", "/v1/events/stream", "/v1/jobs"):
                with plain(serving) as connection:
                    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                    if how == "reset":
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    elif how == "half":
                        connection.shutdown(socket.SHUT_WR)
                        connection.recv(1 << 16)
        end = time.monotonic() + DEADLINE / 2  # they would not end by themselves before
        while not {b"awexd_metaserver_watchers 0", b"awexd_metaserver_streams 0"} <= set(
            client.call("metrics").splitlines()
        ):
            assert time.monotonic() < end


def _engine() -> dict[str, object]:
    worker = {"rank": 0, "state": "empty", "version": None, "digest": DIGEST}
    return {"engine": "e", "world_size": 1, "workers": [worker]}


def test_a_stream_whose_reader_takes_nothing_is_ended_and_others_go_on(serving: MetaServer) -> None:
    with plain(serving) as slow, Client(serving) as client:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /v1/events/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        slow.recv(64)
        client.announce("loud")
        number, end = 0, time.monotonic() + DEADLINE
        while b"awexd_metaserver_streams 0" not in client.call("metrics").splitlines():
            assert time.monotonic() < end
            for _ in range(200):
                number += 1
                where = {"node": "loud", "run": RUN, "world_size": 1, "keep": 1, "epoch": "continue", "after": None}
                client.call("join", where | {"ranks": [[0, f"i{number}", DIGEST]]}, job="loud/job")
        assert number > 1000


def test_more_connections_than_allowed_are_told_so(folder: Path) -> None:
    with MetaServer(folder, "--max-connections", "4") as server, ExitStack() as stack:
        first = stack.enter_context(plain(server))
        for _ in range(3):
            stack.enter_context(plain(server))
        first.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        with plain(server) as fifth:
            assert [status for status, _, _ in answers(fifth)] == [503]
        first.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert first.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_node_that_says_nothing_is_gone_after_its_ttl_and_watchers_hear_of_it(folder: Path) -> None:
    with MetaServer(folder, "--node-ttl", "0.5") as server, Client(server) as client:
        for node in ("n0", "n1"):
            client.announce(node)
        client.join(JOB, "n0", [0], 2)
        client.join(JOB, "n1", [1], 2)
        attempt = client.begin(JOB, "n0", 1, 1, [0])
        client.seal(JOB, "n0", 1, 1, attempt, [0])
        end = time.monotonic() + DEADLINE
        brief = client.call("job", job=JOB)["brief"]
        while brief["absent"] != [1]:
            assert time.monotonic() < end
            client.call("renew", {"run": RUN}, node="n0")
            query = {"after": brief["seq"], "timeout_ms": 100}
            brief = client.call("watch", job=JOB, query=query) or brief
        assert [node["node"] for node in client.call("nodes")["nodes"]] == ["n0"]
        assert client.call("events")["events"][-1]["text"].startswith("node n1 is gone: not heard of for 0.5 s")
        while client.call("nodes")["nodes"]:
            assert time.monotonic() < end
        with pytest.raises(Failed) as failure:
            client.seal(JOB, "n0", 1, 1, attempt, [0])
        assert failure.value.error["details"] == {"announce": True}


def test_a_thousand_watchers_hear_of_every_change(folder: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < WATCHERS + 200:
        pytest.skip(f"needs {WATCHERS + 200} open files: ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with MetaServer(folder) as server, Client(server) as client, ExitStack() as stack:
        client.announce("n0")
        client.join(JOB, "n0", [0], 1)
        watchers = [stack.enter_context(plain(server)) for _ in range(WATCHERS)]
        for step in range(3):
            attempt = client.begin(JOB, "n0", 1, step, [0])
            seq = client.call("job", job=JOB)["brief"]["seq"]
            ask = f"GET /v1/jobs/{JOB}/watch?after={seq} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            for watcher in watchers:
                watcher.sendall(ask)
            while f"awexd_metaserver_watchers {WATCHERS}".encode() not in client.call("metrics").splitlines():
                pass
            assert client.seal(JOB, "n0", 1, step, attempt, [0])
            told = {watcher.recv(1 << 16) for watcher in watchers}
            assert len(told) == 1
            assert json.loads(told.pop().partition(b"\r\n\r\n")[2])["last_step"] == step


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 16, 17, 4095, 4096, 1 << 53, (1 << 53) + 1, 1 << 61])
    | st.text(max_size=8)
    | st.sampled_from([RUN, DIGEST, "n0"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
ROUTES = [
    (template, method.upper(), found)
    for template, methods in document()["paths"].items()
    for method, found in methods.items()
    if found["operationId"] != "stream"
]
FIELDS = sorted(
    {name for schema in document()["components"]["schemas"].values() for name in schema.get("properties", ())}
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_route_answers_anything_with_what_the_document_says(shared: MetaServer, data: st.DataObject) -> None:
    template, method, found = data.draw(st.sampled_from(ROUTES))
    part = st.sampled_from(["a", "n0", "grpo", "..", "%00", "A" * 101, DIGEST])
    path = template.format(**{name: data.draw(part) for name in ("node", "owner", "name", "engine", "digest")})
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(["after", "timeout_ms", "limit", "run", "x"]))
        path += (
            f"?{name}={data.draw(st.sampled_from(['0', '1', '99999999999999999', '-1', RUN, '%', '']))}&timeout_ms=0"
        )
    body = b""
    if "requestBody" in found:
        shape = _body_for(found, data) if data.draw(st.integers(0, 3)) else data.draw(JUNK)
        body = json.dumps(shape).encode()
    with plain(shared) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        if "timeout_ms=0" not in path and "timeout" in json.dumps(found):
            head = head.replace(" HTTP", "?timeout_ms=0 HTTP")
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        ((status, headers, answer),) = answers(connection)
    assert status != 500
    check_answer(method, template, status, headers, answer)


def _body_for(found: Any, data: st.DataObject) -> Any:
    """Something near to what the schema asks for: its fields, some of them wrong."""
    content = found["requestBody"]["content"]
    if "application/json" not in content:
        return data.draw(JUNK)
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schemas = document()["components"]["schemas"]
    value = {}
    for field, schema in schemas[name]["properties"].items():
        value[field] = data.draw(JUNK) if data.draw(st.integers(0, 9)) == 0 else sample(schemas, schema, data)
    return value


def sample(schemas: Any, schema: Any, data: st.DataObject) -> Any:
    while "$ref" in schema:
        schema = schemas[str(schema["$ref"]).rpartition("/")[2]]
    if "anyOf" in schema:
        return sample(schemas, data.draw(st.sampled_from(schema["anyOf"])), data)
    if "enum" in schema:
        return data.draw(st.sampled_from(schema["enum"]))
    kind = schema["type"]
    if kind == "integer":
        return data.draw(st.integers(schema["minimum"], min(schema["maximum"], 4)))
    if kind == "array" and "prefixItems" in schema:
        return [sample(schemas, one, data) for one in schema["prefixItems"]]
    if kind == "array":
        return [sample(schemas, schema["items"], data) for _ in range(data.draw(st.integers(0, 2)))]
    if kind == "object":
        properties = schema["properties"].items()
        return {name: sample(schemas, one, data) for name, one in properties}
    if kind == "string":
        pattern = str(schema.get("pattern", ""))
        return DIGEST if "{64}" in pattern and "0-9a-f" in pattern else RUN if "{8,64}" in pattern else "n0"
    return {"boolean": True, "null": None}[str(kind)]
