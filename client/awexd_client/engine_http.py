"""An inference server's own HTTP routes, as the drivers of engines call them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from awexd_transports.errors import AwexdError, DeadlineExceeded


class EngineServer:
    """A server that is called directly, whatever proxies the environment names: an engine is near.

    Args:
        kind: what it is, for messages: ``vLLM``.
        url: its base, as ``http://127.0.0.1:8000``.
        api_key: if it wants one; never shown.
    """

    def __init__(self, kind: str, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._kind = kind
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, method: str, route: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        """One request; the answer's status and body, whatever the status.

        Raises:
            DeadlineExceeded: no answer in time.
            AwexdError: nobody answers there.
        """
        content = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}/{route}", content, self._headers, method=method)
        try:
            with self._opener.open(asked, timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError as error:  # URLError is one, and may have a timeout as its reason
            what = f"{self._kind} at {self.url}"
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                raise DeadlineExceeded(f"{what} did not answer {route} in {timeout:g} s") from error
            raise AwexdError(f"{what} does not answer {route}: {getattr(error, 'reason', error)}") from error
