"""vLLM's weight transfer back end ``awexd``: one in each worker. Imported by vLLM, in its processes, when it is chosen.

vLLM calls all workers and waits for all between two calls, so a version is staged on every worker
(``update_weights``) before one touches a byte (``finish_weight_update``). What one worker could not do, no one does:
they tell each other after each call.

Only the last worker lets an exception out. vLLM's executor reads the workers' answers in order and stops at the first
that failed (vllm/v1/executor/multiproc_executor.py, 0.32 and 0.33), so that what the later ones answered would be taken
for the answers to its next call, and every call after that for another's. For the same reason a failure ends the update
on every worker: the next start would else be refused by some.
"""

from __future__ import annotations

import json
import sys
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
        abandon: change nothing of that, and give up the update that is under way, if one is. Possible at any time.
        checkpoint, token: change nothing either; compare the live tensors with that folder, and tell the daemon.
    """

    job: str = ""
    engine: str = "vllm"
    socket: str | None = None
    verify: str = "checksum"
    timeout: float = DEFAULT_TIMEOUT
    abandon: bool = False
    checkpoint: str = ""
    token: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``update_info``: which version to stage.

    Attributes:
        step: None: the newest.
        timeout: seconds for staging, a version's arrival included, and again for applying it.
    """

    step: int | None = None
    timeout: float = DEFAULT_TIMEOUT


class AwexdWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One worker's side of the updates."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._worker = _worker_that_makes_this()
        self._reader: WorkerWeightsReader | None = None
        self._staged: Staged | None = None
        self._timeout = DEFAULT_TIMEOUT

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Nothing yet: what is wrong with it is raised where it may be, in ``init_transfer_engine``."""
        return init_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        """Connects to the daemon and registers this worker's tensors; again, if they are registered already.

        Raises:
            AwexdError: some worker could not, on the last one.
        """
        self._end_update()
        failure = None
        try:
            info = super().parse_init_info(init_info) if isinstance(init_info, dict) else init_info
            if info.checkpoint:
                self._connected().compare_and_tell(info.checkpoint, info.token, info.timeout)
            elif not info.abandon:
                self._connect(info)
        except Exception as error:  # noqa: BLE001 - told to all workers, and raised by the one that may
            failure = _said(error)
        self._settle(failure)

    def start_weight_update(self) -> None:
        """What an update before may have left is given up."""
        self._give_up()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stages a version on every worker, or on none; touches no live tensor.

        Raises:
            AwexdError: some worker could not, on the last one.
        """
        failure = None
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:  # noqa: BLE001 - told to all workers, and raised by the one that may
            failure = _said(error)
        self._settle(failure)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """This worker's part of it."""
        self._give_up()
        reader = self._connected()
        try:
            self._staged = reader.stage(update_info.step, update_info.timeout)
        except Exception as error:
            reader.fail(error)
            raise
        self._timeout = update_info.timeout

    def finish_weight_update(self) -> None:
        """Applies what is staged, on every worker.

        Raises:
            AwexdError: some worker could not, on the last one; what the live tensors hold now, ``status`` tells.
        """
        staged = self._staged
        versions = self._told_by_all(f"{staged.epoch}.{staged.step}" if staged else None)
        if staged is None or len(set(versions)) > 1:
            self._settle(f"the workers have not staged one version: {versions}")
            return
        self._staged = None
        failure = None
        try:
            self._connected().apply(staged, self._timeout)
        except Exception as error:  # noqa: BLE001 - told to all workers, and raised by the one that may
            failure = _said(error)
        self._settle(failure)

    def shutdown(self) -> None:
        """Ends this worker's session; the weights stay as they are. ``init_transfer_engine`` may begin another."""
        reader, self._reader, self._staged = self._reader, None, None
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

    def _give_up(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and self._reader is not None:
            self._reader.release(staged)

    def _end_update(self) -> None:
        """This worker is in no update any more; vLLM itself ends it only where an exception was let out."""
        self._give_up()
        self._worker._weight_update_active = False

    def _settle(self, failure: str | None) -> None:
        """Ends the update everywhere if it failed anywhere. All workers must call it.

        Raises:
            AwexdError: it failed; on the last worker.
        """
        failures = [said for said in self._told_by_all(failure) if said]
        if not failures:
            return
        self._end_update()
        if self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise AwexdError(failures[0])

    def _told_by_all(self, mine: Any) -> list[Any]:
        """What each worker of the replica says, in rank order: plain JSON values. All must call it."""
        from vllm.distributed import get_pp_group, get_tp_group

        told = [mine]
        for group in (get_tp_group(), get_pp_group()):
            if group.world_size > 1:
                told = [said for each in _gathered(told, group) for said in each]
        return told


def _gathered(mine: list[Any], group: Any) -> list[list[Any]]:
    """What each rank of a group says. ``torch.distributed.all_gather_object`` would pickle it."""
    import torch
    from torch.distributed import all_gather

    body = json.dumps(mine).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.world_size)]
    all_gather(sizes, torch.tensor([len(body)]), group=group.cpu_group)
    room = max(int(size) for size in sizes)
    said = [torch.zeros(room, dtype=torch.uint8) for _ in sizes]
    all_gather(said, torch.frombuffer(bytearray(body.ljust(room)), dtype=torch.uint8), group=group.cpu_group)
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(said, sizes, strict=True)]


def _said(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, AwexdError) else f"{type(error).__name__}: {text}"


def _worker_that_makes_this() -> Any:
    """vLLM's worker whose call this is: it does not say to its back end who it is.

    Raises:
        InvalidArgument: it is not there, or not the one that is known.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "_weight_update_active"):
            return caller
        frame = frame.f_back
    raise InvalidArgument("this version of vLLM keeps its updates in another way than awexd knows (0.32 and 0.33)")
