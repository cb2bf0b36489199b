"""What becomes of calls that an SGLang server refuses, or does not answer. The rest is in tests/engines/sglang."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from awexd_client import AwexdError, DeadlineExceeded, InvalidArgument
from awexd_client.sglang import SGLangServer, drivers


class _Answers(BaseHTTPRequestHandler):
    """Says how many ranks there are, and refuses to update as SGLang does without our plug-in."""

    def do_GET(self) -> None:
        self._answer(200, {"tp_size": 2})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(body), self.headers["Authorization"]))  # type: ignore[attr-defined]
        refused = self.path == "/update_weights_from_tensor"
        self._answer(400 if refused else 200, {"success": not refused, "message": "must run between begin and end"})

    def log_message(self, *_: object) -> None:
        return None

    def _answer(self, status: int, said: object) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def answering() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_server_without_the_plug_in_says_what_to_do(answering: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{answering.server_port}/"
    workers = SGLangServer(url, "grpo", "e", "/run/s", pause="in_place", api_key="secret")
    with pytest.raises(AwexdError, match=r"update_weights_from_tensor \(400\): must run between") as caught:
        workers.stage(3, 5)
    assert "SGLANG_PLUGINS" in caught.value.__notes__[0]
    pause, update = answering.asked  # type: ignore[attr-defined]
    assert pause == ("/pause_generation", {"mode": "in_place"}, "Bearer secret")
    assert len(update[1]["serialized_named_tensors"]) == 2
    assert "secret" not in repr(workers)


def test_unknown_way_to_pause() -> None:
    with pytest.raises(InvalidArgument, match="retract, in_place, abort"):
        SGLangServer("http://127.0.0.1:1", "grpo", "e", pause="stop")


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(AwexdError, match="does not answer pause_generation"):
        SGLangServer(url, "grpo", "e", "/run/s").stage(None, 1)


def test_server_that_never_answers_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "GRACE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match=r"SGLang at http://.* did not answer pause_generation in 0\.\d+ s"):
            SGLangServer(url, "grpo", "e", "/run/s").stage(None, 0.1)
