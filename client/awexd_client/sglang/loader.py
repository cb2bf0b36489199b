"""In each scheduler process of SGLang: the reader of this rank, behind SGLang's own hooks.

SGLang ends the whole server where a loader raises, and takes whatever returns for a success. So :func:`load` catches
all: the daemon is told why, and the plug-in makes SGLang's answer a failure. The engine lives, on the weights it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.sglang import SGLangAdapter
from awexd_client.endpoint import failed
from awexd_client.reader import WorkerWeightsReader
from awexd_client.sglang.control import LOADER, Control, control_in
from awexd_client.updates import Staged
from awexd_transports.errors import InvalidArgument, VersionUnavailable

if TYPE_CHECKING:
    import torch

_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_log = logging.getLogger(__name__)


class Rank:
    """This process's reader and what it has staged."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.in_session = True
        self._reader: WorkerWeightsReader | None = None
        self._adapter: SGLangAdapter | None = None
        self._made_for: tuple[object, ...] = ()
        self._staged: Staged | None = None

    def serve(self, model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """One control message; never raises. What went wrong is told to the daemon and kept in ``failure``."""
        self.failure = None
        try:
            control = control_in(named_tensors)
            reader = self._reader_for(model, control)
            act = {"stage": self._stage, "apply": self._apply, "abandon": self._abandon, "verify": self._verify}
            act[control.do](reader, control)
        except Exception as error:  # noqa: BLE001 - SGLang would end the server
            self.failure = f"{type(error).__name__}: {failed(error)}"
            _log.warning("the engine keeps its weights: %s", self.failure, exc_info=error)
            self._give_up(error)

    def _reader_for(self, model: torch.nn.Module, control: Control) -> WorkerWeightsReader:
        made_for = (control.job, control.engine, control.socket, control.direct, id(model))
        if self._reader is not None and self._made_for == made_for:
            return self._reader
        if self._reader is not None:
            self._reader.close()
            self._reader = self._staged = None
        rank, world_size = _place()
        reader = WorkerWeightsReader(
            control.job, control.engine, rank, world_size, control.socket, timeout=control.timeout
        )
        adapter = SGLangAdapter(direct=control.direct)
        try:
            reader.register(model, adapter, timeout=control.timeout)
        except BaseException:
            reader.close()
            raise
        self._reader, self._adapter, self._made_for = reader, adapter, made_for
        return reader

    def _stage(self, reader: WorkerWeightsReader, control: Control) -> None:
        self._drop()
        self._staged = reader.stage(control.step, control.timeout)

    def _apply(self, reader: WorkerWeightsReader, control: Control) -> None:
        if not self.in_session:
            raise InvalidArgument("weights are applied between begin_weight_update and end_weight_update")
        staged, self._staged = self._staged, None
        if staged is None or (staged.epoch, staged.step) != (control.epoch, control.step):
            if staged is not None:
                reader.release(staged)
            raise VersionUnavailable(f"{control.job}: epoch {control.epoch} step {control.step} is not staged here")
        reader.apply(staged, control.timeout)

    def _abandon(self, reader: WorkerWeightsReader, control: Control) -> None:
        self._drop()

    def _verify(self, reader: WorkerWeightsReader, control: Control) -> None:
        if not control.checkpoint or not control.token:
            raise InvalidArgument("control message: verify needs checkpoint and token")
        self._drop()
        reader.compare_and_tell(control.checkpoint, control.token, control.timeout)

    def _drop(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and self._reader is not None:
            self._reader.release(staged)
        if self._adapter is not None:
            self._adapter.clear()

    def _give_up(self, error: Exception) -> None:
        if self._reader is None:
            return
        try:
            self._drop()
            self._reader.fail(error)
        except Exception as another:  # noqa: BLE001 - SGLang would end the server
            _log.warning("the daemon could not be told: %s", another)


_rank = Rank()


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``--custom-weight-loader``: called in every scheduler process, with a control message. Never raises."""
    _rank.serve(model, named_tensors)


def register() -> None:
    """SGLang's plug-in (entry point ``sglang.srt.plugins``), run once in each of its processes.

    It adds to the loader what SGLang's own calls lack: a version is staged before the engine's update session begins,
    and a failure is answered as one.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SCHEDULER}.update_weights_from_tensor", _without_session, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_tensor", _with_outcome, HookType.AROUND)


def _without_session(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Lets our messages through outside of a session too; there nothing is applied.

    A session that begins and ends with no weights loaded would transform packed weights once more.
    """
    if request.load_format != LOADER or manager._session is not None:
        return update(manager, request)
    from sglang.srt.managers.scheduler_components.weight_updater import _WeightUpdateSession

    manager._session, _rank.in_session = _WeightUpdateSession(selector=request.selector), False
    try:
        return update(manager, request)
    finally:
        manager._session, _rank.in_session = None, True


def _with_outcome(update: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """SGLang answers (success, message); a loader's own failure it cannot see."""
    outcome = update(*arguments, **options)
    failure, _rank.failure = _rank.failure, None
    return outcome if failure is None else (False, failure)


def _place() -> tuple[int, int]:
    """This process's rank among those that hold the model, and how many there are: tensor ranks of each stage."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.pp_rank * parallel.tp_size + parallel.tp_rank, parallel.pp_size * parallel.tp_size
