"""A MetaServer's client: one request after another, typed errors, and the run that each answer names.

Raises :mod:`awexd_transports.errors` only: ``DaemonUnavailable`` where the MetaServer cannot be reached or does not
speak as it should, and what it refuses as the error that its answer carries.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson

from awexd.metaserver.tokens import ROLES, read_tokens
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    from_wire,
)

MAX_ANSWER_BYTES = 64 << 20
REQUEST_SECONDS = 15.0
CONNECT_SECONDS = 5.0
"""Of one request's time, for the connection; also before TLS is found not to work."""


class MetaClient:
    """Talks to one MetaServer; ``close`` it.

    Attributes:
        run: of the MetaServer's process, as the last answer named it; "" before the first.

    Args:
        token: "" where it wants none.
        context: for ``https``; None: this machine's own authorities.
        connections: at once; 0: as many as there are requests.
    """

    def __init__(
        self, url: str, token: str = "", context: ssl.SSLContext | None = None, *, connections: int = 8
    ) -> None:
        self.url = url.rstrip("/")
        self.run = ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, ssl=context if context is not None else True),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            headers=headers,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout: float = REQUEST_SECONDS,  # noqa: ASYNC109 - every call that can wait takes it
    ) -> Any:
        """The answer's JSON; its bytes where it has none, and None where there is nothing new.

        Raises:
            AwexdError: as the MetaServer says, or it does not.
        """
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(
                    method,
                    self.url + path,
                    data=data,
                    params=query,
                    headers={} if data is None else {"Content-Type": kind},
                    allow_redirects=False,
                ) as response,
            ):
                self.run = response.headers.get("Awexd-Run", "")
                found = await response.content.read(MAX_ANSWER_BYTES + 1)
                while not response.content.at_eof() and len(found) <= MAX_ANSWER_BYTES:
                    found += await response.content.read(MAX_ANSWER_BYTES + 1 - len(found))
                status, kind = response.status, response.content_type
        except TimeoutError:
            raise DeadlineExceeded(
                f"the MetaServer at {self.url} did not answer {method} {path} in {timeout:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise DaemonUnavailable(f"the MetaServer at {self.url}: {str(error) or type(error).__name__}") from error
        if not self.run or len(found) > MAX_ANSWER_BYTES:
            raise DaemonUnavailable(f"what answers at {self.url} is no MetaServer")
        return self._value(status, kind, found)

    def _value(self, status: int, kind: str, body: bytes) -> Any:
        if status == 204:
            return None
        if kind != "application/json":
            return body
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise DaemonUnavailable(f"the MetaServer at {self.url} answers with what is no JSON") from error
        if status < 400:
            return value
        known = (
            isinstance(value, dict) and isinstance(value.get("code"), str) and isinstance(value.get("details"), dict)
        )
        if not known:
            raise AwexdError(f"the MetaServer at {self.url} answers with status {status}")
        raise from_wire(value["code"], str(value.get("message")), value["details"])

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def token_for(path: Path | None, role: str) -> str:
    """The first token of a file with at least that role; "" without a file.

    Raises:
        InvalidArgument: it cannot be used.
        AccessDenied: it has no such token.
    """
    if path is None:
        return ""
    for found, token in read_tokens(path):
        if ROLES.index(found) >= ROLES.index(role):
            return token
    raise AccessDenied(f"token file {path}: no token of the role {role}")


def tls_context(url: str, ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """For a MetaServer at that URL; None where nothing is out of the ordinary.

    Raises:
        InvalidArgument: files that cannot be used, or for a URL without TLS.
    """
    if ca is None and cert is None and key is None:
        return None
    if not url.startswith("https:"):
        raise InvalidArgument(f"{url}: TLS files are for https://")
    if (cert is None) != (key is None):
        raise InvalidArgument("tls_cert and tls_key go together")
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"TLS files: {error}") from error
    return context
