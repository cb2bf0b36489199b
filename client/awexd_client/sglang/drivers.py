"""What drives one instance of SGLang from its control process: for ``WeightReader(job, engine, workers)``.

Staging: generation is paused, each worker leases and checks the version. Applying: an update session around the copy,
then, once the daemon says that every worker is at the version, the prefix cache is emptied, the server's
``weight_version`` becomes ``EPOCH.STEP``, and generation goes on. While a worker is dirty the instance stays paused: it
must not serve a mix.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline
from awexd_client.engine_http import EngineServer
from awexd_client.session import Connection, socket_path
from awexd_client.sglang.control import LOADER, Control, pickled
from awexd_transports.errors import AwexdError, DeadlineExceeded, InvalidArgument

PAUSES = ("retract", "in_place", "abort")
GRACE_SECONDS = 10.0
"""How much longer than a call's own deadline its answer is awaited."""
_NO_SESSION = "must run between"


class _Driver(ABC):
    """The calls of one update, whatever way they go; arguments as of SGLangServer."""

    def __init__(
        self,
        job: str,
        engine: str,
        socket: str | os.PathLike[str] | None = None,
        *,
        pause: str = "retract",
        direct: bool = True,
    ) -> None:
        if pause not in PAUSES:
            raise InvalidArgument(f"pause must be one of {', '.join(PAUSES)}, not {pause!r}")
        self._job, self._engine, self._socket = job, engine, socket
        self._pause, self._direct = pause, direct
        self._touched = False
        """Weights may have been written since all were last known to be of one version."""

    def stage(self, step: int | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Every worker leases and checks that step, or the next one. Generation is paused from here on."""
        deadline = Deadline(timeout)
        self._call("pause_generation", {"mode": self._pause}, deadline)
        try:
            self._send("stage", deadline, step=step)
        except AwexdError as error:
            if _NO_SESSION in str(error):
                error.add_note("the plug-in awexd is not loaded: name it in SGLANG_PLUGINS, or unset that")
            raise

    def apply(self, epoch: int, step: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Every worker applies it; generation goes on if all have.

        Raises:
            AwexdError: some have not. The instance stays paused if its weights are a mix.
        """
        deadline = Deadline(timeout)
        self._begin(deadline)
        self._touched = True
        try:
            self._send("apply", deadline, epoch=epoch, step=step)
        except BaseException:
            with contextlib.suppress(Exception):
                self._call("end_weight_update", {}, Deadline(GRACE_SECONDS))
            self._resume_unless_torn(Deadline(GRACE_SECONDS))
            raise
        self._call("end_weight_update", {}, deadline)
        late = [worker["rank"] for worker in self._workers(deadline) if worker["version"] != [epoch, step]]
        if late:
            self._resume_unless_torn(deadline)
            raise AwexdError(f"{self._engine}: ranks {late} did not apply epoch {epoch} step {step}")
        self._touched = False
        self._call("flush_cache", {}, deadline)
        self._call("update_weight_version", {"new_version": f"{epoch}.{step}", "abort_all_requests": False}, deadline)
        self._call("continue_generation", {}, deadline)

    def abandon(self) -> None:
        """Every worker gives up what it has staged; generation goes on, unless the weights are a mix."""
        deadline = Deadline(DEFAULT_TIMEOUT)
        try:
            self._send("abandon", deadline)
        finally:
            self._resume_unless_torn(deadline)

    def verify(self, checkpoint_dir: str, token: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Every worker compares what it has with that folder; generation is paused meanwhile."""
        deadline = Deadline(timeout)
        self._call("pause_generation", {"mode": self._pause}, deadline)
        try:
            self._send("verify", deadline, checkpoint=checkpoint_dir, token=token)
        finally:
            self._resume_unless_torn(Deadline(GRACE_SECONDS))

    def _begin(self, deadline: Deadline) -> None:
        """A session that an earlier control process left open is ended first."""
        try:
            self._call("begin_weight_update", {"selector": "target"}, deadline)
        except AwexdError:
            self._call("end_weight_update", {}, deadline)
            self._call("begin_weight_update", {"selector": "target"}, deadline)

    def _send(self, do: str, deadline: Deadline, **more: Any) -> None:
        path = socket_path(self._socket)
        control = Control(do, self._job, self._engine, deadline.left(), path, direct=self._direct, **more)
        payload = self._payload(pickled(control.encoded()))
        body = {
            "serialized_named_tensors": [payload] * self._tensor_ranks(deadline),
            "load_format": LOADER,
            "flush_cache": False,  # by a call of its own: a rank that failed would keep what others drop
            "selector": "target",
        }
        self._call("update_weights_from_tensor", body, deadline)

    def _resume_unless_torn(self, deadline: Deadline) -> None:
        try:
            workers = self._workers(deadline)
        except AwexdError:
            torn = self._touched  # none has registered, or the daemon is away
        else:
            versions = {tuple(worker["version"] or ()) for worker in workers}
            torn = len(versions) > 1 or any(worker["state"] == "dirty" for worker in workers)
        if not torn:
            self._call("continue_generation", {}, deadline)

    def _workers(self, deadline: Deadline) -> list[dict[str, Any]]:
        """What the daemon knows of each worker.

        Raises:
            AwexdError: it knows none, or cannot be asked.
        """
        connection = Connection(socket_path(self._socket))
        try:
            arguments = {"job": self._job, "engine": self._engine}
            told = connection.call("read.engine", arguments, timeout=max(1.0, deadline.left()))[0]
        finally:
            connection.close()
        workers: list[dict[str, Any]] = told["workers"]
        return workers

    @abstractmethod
    def _call(self, route: str, body: dict[str, Any], deadline: Deadline) -> Any:
        """One of SGLang's own calls; raises AwexdError where it was refused."""

    @abstractmethod
    def _payload(self, pickle: bytes) -> Any:
        """As the call takes it."""

    @abstractmethod
    def _tensor_ranks(self, deadline: Deadline) -> int:
        """Ranks of one stage: each is given a payload."""


class SGLangServer(_Driver):
    """An SGLang server, over HTTP.

    Args:
        url: its base, such as ``http://127.0.0.1:30000``.
        job, engine: of the instance; its workers' readers are made with them.
        socket: of the daemon, the same path for the server's processes as here.
        pause: what becomes of running requests: ``"retract"`` queues them again, they go on with the new weights;
            ``"abort"`` ends them. ``"in_place"`` keeps their caches: emptying is refused while there are any.
        direct: False has the models load everything themselves.
        api_key: the server's admin or API key, where it has one.
    """

    def __init__(
        self,
        url: str,
        job: str,
        engine: str,
        socket: str | os.PathLike[str] | None = None,
        *,
        pause: str = "retract",
        direct: bool = True,
        api_key: str | None = None,
    ) -> None:
        super().__init__(job, engine, socket, pause=pause, direct=direct)
        self._at = EngineServer("SGLang", url, api_key)
        self._ranks: int | None = None

    def _call(self, route: str, body: dict[str, Any] | None, deadline: Deadline) -> Any:
        method = "GET" if body is None else "POST"
        status, answer = self._at.call(method, route, body, deadline.left() + GRACE_SECONDS)
        said, text = _said(answer)
        if status != 200:
            raise AwexdError(f"SGLang refused {route} ({status}): {said.get('message', text)}")
        if said.get("success") is False:
            raise AwexdError(f"SGLang refused {route}: {said.get('message', text)}")
        return said

    def _payload(self, pickle: bytes) -> str:
        return base64.b64encode(pickle).decode()

    def _tensor_ranks(self, deadline: Deadline) -> int:
        if self._ranks is None:
            self._ranks = _tensor_ranks(self._call("server_info", None, deadline))
        return self._ranks


def _tensor_ranks(server_args: Mapping[str, Any]) -> int:
    """Tensor ranks of a stage.

    Raises:
        InvalidArgument: replicas behind one server, which SGLang does not update (``update_weights_from_tensor`` of
            managers/tokenizer_control_mixin.py).
    """
    replicas = int(server_args.get("dp_size") or 1)
    if replicas > 1 and not server_args.get("enable_dp_attention"):
        raise InvalidArgument(
            f"SGLang takes no new weights with --dp-size {replicas}; start a server for each of the {replicas}"
            " replicas, an engine of its own each"
        )
    return int(server_args["tp_size"])


def _said(body: bytes) -> tuple[dict[str, Any], str]:
    """An answer's object, where it is one, and its text."""
    text = body.decode(errors="replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {}, text[:1000]


_REQUESTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "flush_cache": None,
}
"""Methods of SGLang's tokenizer manager (which its HTTP routes call too), and what they take."""


class SGLangWorkers(_Driver):
    """The ``sgl.Engine`` of this process; its calls are made in the thread that made it.

    Args:
        server: the ``sgl.Engine``. Other arguments as of SGLangServer.
    """

    def __init__(
        self,
        server: Any,
        job: str,
        engine: str,
        socket: str | os.PathLike[str] | None = None,
        *,
        pause: str = "retract",
        direct: bool = True,
    ) -> None:
        super().__init__(job, engine, socket, pause=pause, direct=direct)
        self._server = server

    def _call(self, route: str, body: dict[str, Any], deadline: Deadline) -> Any:
        import asyncio

        from sglang.srt.managers import io_struct

        kind = _REQUESTS[route]
        given = [] if kind is None else [getattr(io_struct, kind)(**body)]
        asked = getattr(self._server.tokenizer_manager, route)(*given)
        try:
            outcome = self._server.loop.run_until_complete(asyncio.wait_for(asked, deadline.left() + GRACE_SECONDS))
        except TimeoutError as error:
            raise DeadlineExceeded(f"SGLang did not answer {route} in time") from error
        if isinstance(outcome, tuple):
            success, message = outcome[:2]
        else:
            success, message = getattr(outcome, "success", True), getattr(outcome, "message", "")
        if not success:
            raise AwexdError(f"SGLang refused {route}: {message}")
        return outcome

    def _payload(self, pickle: bytes) -> bytes:
        return pickle

    def _tensor_ranks(self, deadline: Deadline) -> int:
        given = self._server.server_args
        return _tensor_ranks({key: getattr(given, key, None) for key in ("tp_size", "dp_size", "enable_dp_attention")})
