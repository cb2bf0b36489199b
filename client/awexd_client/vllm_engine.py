"""vLLM's weight transfer back end ``awexd``: one in each worker. Imported by vLLM, in its processes, when it is chosen.

vLLM calls all workers and waits for all between two calls, so a version is staged on every worker
(``update_weights``) before one touches a byte (``finish_weight_update``). What one worker could not do, no one does:
they tell each other after each call.

With more than one worker an exception must not leave any but the last: vLLM's executor reads the workers' answers in
order and stops at the first that failed (vllm/v1/executor/multiproc_executor.py, 0.32), so that what the later ones
answered would be taken for the answers to its next call. There a failure to stage is kept until
``finish_weight_update``, which the last worker fails; the daemon knows of it at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from awexd_client.adapters.vllm import VLLMAdapter
from awexd_client.endpoint import DEFAULT_TIMEOUT
from awexd_client.reader import WorkerWeightsReader
from awexd_client.updates import Staged
from awexd_transports.errors import AwexdError, InvalidArgument


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``init_info``: which job's weights this engine gets.

    Attributes:
        job: ``owner/name``; a bare name is this user's own.
        engine: this instance's name in the job.
        socket: of the daemon; None: ``$AWEXD_SOCKET``, else the default.
        verify: as of WorkerWeightsReader.
        timeout: seconds to connect and to register.
    """

    job: str = ""
    engine: str = "vllm"
    socket: str | None = None
    verify: str = "checksum"
    timeout: float = DEFAULT_TIMEOUT


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``update_info``: which version to stage.

    Attributes:
        step: None: the newest.
        timeout: seconds for staging, a version's arrival included, and again for applying it.
        abandon: stage nothing, and give up what is staged.
    """

    step: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    abandon: bool = False


class AwexdWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One worker's side of the updates."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: WorkerWeightsReader | None = None
        self._staged: Staged | None = None
        self._timeout = DEFAULT_TIMEOUT
        self._failure: str | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """As vLLM's, but that the error is raised where it may be: in ``init_transfer_engine``."""
        return init_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        """Connects to the daemon and registers this worker's tensors; again, if they are registered already."""
        failure = None
        try:
            info = super().parse_init_info(init_info) if isinstance(init_info, dict) else init_info
            self._connect(info)
        except Exception as error:  # noqa: BLE001 - told to all workers, and raised by the one that may
            failure = _said(error)
        self._settle([failure])

    def start_weight_update(self) -> None:
        """What an update before has left is given up."""
        self._give_up()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stages a version on every worker, or on none; touches no live tensor."""
        failure = None
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:  # noqa: BLE001 - told to all workers, and raised by the one that may
            failure = _said(error)
        failures = [said for said in self._told_by_all(failure) if said]
        if not failures:
            return
        self._give_up()
        self._failure = failures[0]
        if self._alone:
            self._settle([self._failure])

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._give_up()
        if update_info.abandon:
            return
        reader = self._connected()
        try:
            self._staged = reader.stage(update_info.step, update_info.timeout)
        except AwexdError:
            raise
        except Exception as error:
            reader.fail(error)
            raise
        self._timeout = update_info.timeout

    def finish_weight_update(self) -> None:
        """Applies what is staged on every worker; nothing, where one of them failed to stage.

        Raises:
            AwexdError: some worker could not, on the last one; what the live tensors hold now, ``status`` tells.
        """
        failure, self._failure = self._failure, None
        staged, self._staged = self._staged, None
        version = (staged.epoch, staged.step) if staged else None
        told = self._told_by_all((version, failure))
        failures = [said for _, said in told if said]
        if not failures and len({at for at, _ in told}) > 1:
            failures = [f"the workers have staged different versions: {[at for at, _ in told]}"]
        if staged is not None and not failures:
            failures = [self._apply(staged)]
        elif staged is not None:
            self._connected().release(staged)
        self._settle(failures)

    def shutdown(self) -> None:
        """Ends this worker's session; the weights stay as they are. ``init_transfer_engine`` may begin another."""
        reader, self._reader, self._staged, self._failure = self._reader, None, None, None
        if reader is not None:
            reader.close()

    def _connect(self, info: InitInfo) -> None:
        if not info.job:
            raise InvalidArgument("init_info needs 'job': whose weights these are to be")
        self.shutdown()
        engine, rank, world_size = self._place(info.engine)
        reader = WorkerWeightsReader(
            info.job,
            engine,
            rank,
            world_size,
            info.socket,
            verify=info.verify,
            timeout=info.timeout,
        )
        try:
            reader.register(self.model, VLLMAdapter(self.vllm_config), info.timeout)
        except BaseException:
            reader.close()
            raise
        self._reader = reader

    def _place(self, engine: str) -> tuple[str, int, int]:
        """Engine, rank and number of workers: replicas that share experts are one engine, others one each."""
        parallel = self.parallel_config
        replica, replicas = parallel.data_parallel_index, parallel.data_parallel_size
        if replicas > 1:  # numbered as Worker.update_weights does
            return engine, replica * parallel.world_size + parallel.rank, replicas * parallel.world_size
        return f"{engine}-{replica}" if replica else engine, parallel.rank, parallel.world_size

    def _connected(self) -> WorkerWeightsReader:
        if self._reader is None:
            raise InvalidArgument("init_weight_transfer_engine with {'job': ...} comes first")
        return self._reader

    def _apply(self, staged: Staged) -> str | None:
        try:
            self._connected().apply(staged, self._timeout)
        except Exception as error:  # noqa: BLE001 - told to all workers, and raised by the one that may
            return _said(error)
        return None

    def _give_up(self) -> None:
        staged, self._staged, self._failure = self._staged, None, None
        if staged is not None and self._reader is not None:
            self._reader.release(staged)

    @property
    def _alone(self) -> bool:
        return bool(self.parallel_config.world_size == 1)

    def _settle(self, failures: list[str | None]) -> None:
        """Raises what any worker failed of, where that can be raised.

        Raises:
            AwexdError
        """
        failed = [said for told in self._told_by_all(failures) for said in told if said]
        if failed and self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise AwexdError(failed[0])

    def _told_by_all(self, mine: Any) -> list[Any]:
        """What each worker of the replica says, in rank order. All must call it."""
        from torch.distributed import all_gather_object
        from vllm.distributed import get_pp_group, get_tp_group

        told = [mine]
        for group in (get_tp_group(), get_pp_group()):
            if group.world_size > 1:
                gathered: list[Any] = [None] * group.world_size
                all_gather_object(gathered, told, group=group.cpu_group)
                told = [said for each in gathered for said in each]
        return told


def _said(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, AwexdError) else f"{type(error).__name__}: {text}"
