"""The driver of a vLLM server, where the server is not there, slow, or says no; all else is tests/engines/vllm."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from awexd_client import vllm
from awexd_client.vllm import VLLMServer
from awexd_transports.errors import AwexdError, DeadlineExceeded

released = threading.Event()
seen: list[tuple[str, str | None]] = []


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        seen.append((self.path, self.headers.get("Authorization")))
        self._say(200, b'{"weight_version": "1.7"}')

    def do_POST(self) -> None:
        if self.path == "/resume":
            released.wait(30)
        self._say(500, b'{"error": {"message": "Worker failed with error \'no room\'"}}')

    def log_message(self, *_: object) -> None:
        """pytest's output is not its log."""

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        released.clear()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            released.set()
            server.shutdown()
            thread.join()


def test_refusal_is_an_error_with_the_servers_own_words(url: str) -> None:
    with pytest.raises(AwexdError, match=r"update_weights: HTTP 500: .*Worker failed with error 'no room'"):
        VLLMServer(url)._ask("update_weights", {"update_info": {}}, 30)


def test_server_that_does_not_answer_is_told_at_the_deadline(url: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"vLLM at http://.* did not answer resume in 0\.1 s"):
        VLLMServer(url)._resume(0.1)


def test_absent_server_is_told_at_once() -> None:
    with pytest.raises(
        AwexdError, match=r"vLLM at http://127\.0\.0\.1:9 does not answer init_weight_transfer_engine: .*refused"
    ):
        VLLMServer("http://127.0.0.1:9").stage(None, 30)


def test_version_is_asked_for_with_the_servers_key_which_is_never_shown(url: str) -> None:
    seen.clear()
    server = VLLMServer(url + "/", api_key="secret")
    assert server.weight_version == "1.7"
    assert seen == [("/weight_info", "Bearer secret")]
    assert "secret" not in repr(server)


def test_plug_in_without_vllm_says_so_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert "no weight transfer API" in caplog.text
