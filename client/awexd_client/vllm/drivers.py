"""Drivers of one running instance of vLLM, for ``WeightReader``: by the calls of an ``LLM``, or over HTTP."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from typing import Any, Self

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline
from awexd_client.engine_http import EngineServer
from awexd_transports.errors import AwexdError, DeadlineExceeded

GRACE = 30.0
"""Seconds that a call may take beyond the deadline that its workers were given: they are to say what was late."""
_QUICK = 10.0


class _Instance(ABC):
    """A vLLM instance, as ``WeightReader`` drives one."""

    def connect(
        self,
        job: str,
        engine: str = "vllm",
        socket: str | None = None,
        *,
        verify: str = "checksum",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Self:
        """Has each worker connect to the daemon and register its tensors.

        Args:
            job, engine, socket, verify: as of WorkerWeightsReader; the socket is one on the engine's machine.

        Raises:
            AwexdError: some worker could not; says why.
        """
        info = {"job": job, "engine": engine, "socket": socket, "verify": verify, "timeout": timeout}
        self._ask("init_weight_transfer_engine", {"init_info": info}, timeout + GRACE)
        return self

    def stage(self, step: int | None, timeout: float) -> None:
        """Every worker stages that step's version, or the newest; requests are served on, between two steps of it."""
        deadline = Deadline(timeout)
        self._give_up()
        self._ask("start_weight_update", {}, _QUICK + GRACE)
        info = {"step": step, "timeout": max(deadline.left(), 0.001)}
        self._ask("update_weights", {"update_info": info}, timeout + GRACE)

    def apply(self, epoch: int, step: int, timeout: float) -> None:
        """Pauses, applies what is staged, says so as ``EPOCH.STEP``, empties the prefix cache and resumes.

        Requests under way are computed anew from their tokens so far. After a failure requests wait, until an update
        succeeds or ``abandon`` is called: there may be a mix of two versions in the live tensors.

        Raises:
            AwexdError: some worker could not.
        """
        self._pause(_QUICK)
        try:
            self._ask("finish_weight_update", {"weight_version": f"{epoch}.{step}"}, timeout + GRACE)
        finally:
            self._forget_prefixes(_QUICK)
        self._resume(_QUICK)

    def abandon(self) -> None:
        """Every worker gives up what it has staged; the engine serves on."""
        self._give_up()
        self._resume(_QUICK)

    def verify(self, checkpoint_dir: str, token: str, timeout: float) -> None:
        """Every worker compares what it has with that folder; the engine does not generate meanwhile."""
        info = {"checkpoint": checkpoint_dir, "token": token, "timeout": timeout}
        self._ask("init_weight_transfer_engine", {"init_info": info}, timeout + GRACE)

    def _give_up(self) -> None:
        """Ends an update that is under way: ``start_weight_update`` in the midst of one fails on every worker."""
        self._ask("init_weight_transfer_engine", {"init_info": {"abandon": True}}, _QUICK + GRACE)

    @abstractmethod
    def _ask(self, operation: str, body: dict[str, Any], timeout: float) -> None:
        """One of vLLM's weight transfer calls, on all workers."""

    @abstractmethod
    def _pause(self, timeout: float) -> None: ...

    @abstractmethod
    def _resume(self, timeout: float) -> None: ...

    @abstractmethod
    def _forget_prefixes(self, timeout: float) -> None:
        """Nothing computed with the former weights is used again."""


class VLLMWorkers(_Instance):
    """The workers of a ``vllm.LLM`` in this process. Not for use while another thread generates with it.

    Args:
        llm: made with ``weight_transfer_config={"backend": "awexd"}``.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def _ask(self, operation: str, body: dict[str, Any], timeout: float) -> None:
        arguments = dict(body)
        version = arguments.pop("weight_version", None)
        try:
            self._llm.collective_rpc(operation, timeout, kwargs=arguments)
        except AwexdError:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"vLLM's {operation} was not over in {timeout:g} s") from error
        except Exception as error:
            raise AwexdError(f"vLLM's {operation} failed: {error}") from error
        if version is not None:
            self._llm.update_weight_version(version)

    def _pause(self, timeout: float) -> None:
        """``LLM`` generates in its callers' threads only."""

    def _resume(self, timeout: float) -> None:
        pass

    def _forget_prefixes(self, timeout: float) -> None:
        self._llm.reset_prefix_cache(reset_running_requests=True)


class VLLMServer(_Instance):
    """A vLLM server over HTTP, started with ``VLLM_SERVER_DEV_MODE=1``, which is what opens these routes.

    Args:
        url: where it serves, as ``http://127.0.0.1:8000``.
        api_key: if it wants one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._server = EngineServer("vLLM", url, api_key)

    def __repr__(self) -> str:
        return f"VLLMServer({self._server.url!r})"

    @property
    def weight_version(self) -> str:
        """What the server says it runs on: ``EPOCH.STEP`` after an update."""
        return str(self._request("GET", "weight_info", None, _QUICK)["weight_version"])

    def _ask(self, operation: str, body: dict[str, Any], timeout: float) -> None:
        self._request("POST", operation, body, timeout)

    def _pause(self, timeout: float) -> None:
        self._request("POST", "pause?mode=keep", None, timeout)

    def _resume(self, timeout: float) -> None:
        self._request("POST", "resume", None, timeout)

    def _forget_prefixes(self, timeout: float) -> None:
        self._request("POST", "reset_prefix_cache?reset_running_requests=true", None, timeout)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        status, text = self._server.call(method, path, body or None, timeout)
        if status != 200:
            raise AwexdError(f"{self._server.url}/{path}: HTTP {status}: {_reason(text)}")
        return json.loads(text) if text else {}


def _reason(body: bytes) -> str:
    """What vLLM's error answers say."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        said = json.loads(text)
        text = str(said.get("error", said.get("detail", said)))
    return text[:2000]
