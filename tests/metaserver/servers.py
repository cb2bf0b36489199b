"""A real MetaServer for tests, and a client whose every answer is checked against the OpenAPI document."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jsonschema
import pytest

START_SECONDS = 30.0
ANSWER_SECONDS = 30.0
RUN = "run-of-a-test"
DIGEST = "a" * 64


class MetaServer:
    """``awexd metaserver`` on a free port of the loopback interface. A context manager: starts and ends it.

    Leaving it fails where it has died or its log has a traceback.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._log = folder / "metaserver.log"
        state = ("--state-dir", str(folder / "metaserver"))
        self.command = [sys.executable, "-m", "awexd", "metaserver", "--port", "0", *state, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.host, self.port, self.tls = "", 0, False

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Returns once it serves; a second start takes the port of the first."""
        notify = self.folder / "metaserver.notify"
        notify.unlink(missing_ok=True)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("AWEXD_")}
        command = [*self.command, "--port", str(self.port)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(notify))
            with open(self._log, "ab") as log:
                environ["NOTIFY_SOCKET"] = str(notify)
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
            handle = os.pidfd_open(self.pid)
            try:
                readable, _, _ = select.select([ready.fileno(), handle], [], [], START_SECONDS)
            finally:
                os.close(handle)
            if ready.fileno() not in readable:
                self.kill()
                pytest.fail(f"the MetaServer did not become ready; its log:\n{self.log()}")
            found = re.search(rb"STATUS=serving (https?)://([0-9.]+|\[::1\]):(\d+)", ready.recv(4096))
        assert found
        self.tls, self.host, self.port = found[1] == b"https", found[2].decode(), int(found[3])
        return self

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Ends it; returns its exit status when it is gone."""
        assert self._process is not None
        self._process.send_signal(number)
        status = self._process.wait(START_SECONDS)
        self._process = None
        return status

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        died = self._process.poll()
        status = died if died is not None else self.kill(signal.SIGTERM)
        if error is not None:
            error.add_note(f"the MetaServer's log:\n{self.log()[-8000:]}")
        elif died is not None or status != -signal.SIGTERM or "Traceback" in self.log():
            pytest.fail(f"the MetaServer ended with {status}; its log:\n{self.log()[-8000:]}")


@lru_cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    body = resources.files("awexd.metaserver").joinpath("openapi.json").read_bytes()
    found: dict[str, Any] = json.loads(body)
    return found


@lru_cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    return jsonschema.Draft202012Validator(schema)


def check_answer(method: str, template: str, status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """What an answer holds, once it is found to be as the document says."""
    responses = document()["paths"][template][method.lower()]["responses"]
    response = responses.get(str(status), responses["default"])
    assert str(status) in responses or 400 <= status < 600, f"{status} of {method} {template} is not described"
    assert re.fullmatch("[0-9a-f]{16}", headers["awexd-run"])
    if status == 204:
        assert not body
        return None
    if "$ref" in response:
        response = document()["components"]["responses"][response["$ref"].rpartition("/")[2]]
    ((kind, content),) = response["content"].items()
    assert headers["content-type"] == kind
    if "schema" not in content:
        return body
    value = json.loads(body)
    _validator(content["schema"]["$ref"].rpartition("/")[2]).validate(value)
    return value


class Failed(Exception):
    """An answer that carries an error."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status, self.code, self.error = status, error["code"], error


class Client:
    """One connection; checks every answer. ``called`` of the class: operations that some client has had answered."""

    called: set[str] = set()  # noqa: RUF012 - of all, on purpose

    def __init__(self, server: MetaServer, token: str = "", context: ssl.SSLContext | None = None) -> None:
        self._token = token
        if context is not None:
            self.http: http.client.HTTPConnection = http.client.HTTPSConnection(
                server.host, server.port, timeout=ANSWER_SECONDS, context=context
            )
        else:
            self.http = http.client.HTTPConnection(server.host, server.port, timeout=ANSWER_SECONDS)
        self.run = ""

    def call(self, operation: str, body: Any = None, *, query: Mapping[str, Any] | None = None, **places: str) -> Any:
        """The checked answer of an operation, named by its operationId.

        Raises:
            Failed: it was refused.
        """
        template, method = _where(operation)
        job = places.pop("job", "")
        if job:
            places["owner"], places["name"] = job.split("/")
        path = template.format(**places)
        if query:
            path += "?" + "&".join(f"{name}={value}" for name, value in query.items())
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/octet-stream"
        elif body is not None:
            headers["Content-Type"], body = "application/json", json.dumps(body).encode()
        self.http.request(method, path, body, headers)
        response = self.http.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        value = check_answer(method, template, response.status, found, response.read())
        self.run = found["awexd-run"]
        if response.status >= 400:
            raise Failed(response.status, value)
        Client.called.add(operation)
        return value

    def announce(self, node: str, run: str = RUN, address: str | None = None) -> Any:
        return self.call("announce", {"run": run, "address": address, "version": "0"}, node=node)

    def join(self, job: str, node: str, ranks: list[int], size: int, run: str = RUN, **more: Any) -> Any:
        body = {"node": node, "run": run, "world_size": size, "keep": 2, "epoch": "continue", "after": None}
        given = more.pop("incarnation", "i1")
        body["ranks"] = [[rank, given, DIGEST] for rank in ranks]
        return self.call("join", body | more, job=job)

    def begin(self, job: str, node: str, epoch: int, step: int, ranks: list[int], run: str = RUN) -> int:
        body = {"node": node, "run": run, "epoch": epoch, "step": step, "ranks": ranks}
        attempt = self.call("begin", body, job=job)["attempt"]
        assert isinstance(attempt, int)
        return attempt

    def seal(self, job: str, node: str, epoch: int, step: int, attempt: int, ranks: list[int], run: str = RUN) -> bool:
        pieces = [[rank, DIGEST, 100 + rank, False] for rank in ranks]
        body = {"node": node, "run": run, "epoch": epoch, "step": step, "attempt": attempt, "pieces": pieces}
        committed = self.call("seal", body, job=job)["committed"]
        assert isinstance(committed, bool)
        return committed

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def report(run: str = RUN, **more: Any) -> dict[str, Any]:
    """A report of a job of which the node has nothing; ``more`` replaces."""
    empty: dict[str, Any] = {"local": False, "epoch": 0, "world_size": 0, "keep": 0}
    kinds = ("ranks", "versions", "engines", "withdrawn", "waiting", "fetching", "coming")
    lists: dict[str, Any] = {key: [] for key in kinds}
    return {"run": run, **empty, **lists, "joined": False, "home": False, "sends": False} | more


@lru_cache
def _where(operation: str) -> tuple[str, str]:
    for template, methods in document()["paths"].items():
        for method, found in methods.items():
            if found["operationId"] == operation:
                return template, method.upper()
    raise KeyError(operation)


@pytest.fixture
def metaserver(folder: Path) -> Iterator[MetaServer]:
    """A running MetaServer without tokens."""
    with MetaServer(folder) as running:
        yield running


@pytest.fixture
def client(metaserver: MetaServer) -> Iterator[Client]:
    with Client(metaserver) as connected:
        yield connected
