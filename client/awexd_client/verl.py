"""A checkpoint engine of verl (0.9): its trainer's weights go to its rollout workers through the daemon of their node.

Importing this registers it. In verl's rollout configuration:

    checkpoint_engine:
      backend: awexd
      custom_backend_module: awexd_client.verl
      engine_kwargs: {awexd: {job: grpo, socket: /run/awexd/awexd.sock}}

verl gives every actor rank a generator of whole checkpoint tensors, in which all ranks must take part to its end; the
master's are published, one version an update, and every rollout worker hands that version's tensors to its server. No
process group is made. ``prepare``, which verl calls before each update, opens the trainer's epoch and says through
verl's own call which epoch and step the workers must wait for: a version of an earlier run is never taken for it.

The bytes are in host memory on their way: tensors of a GPU are copied to it one at a time, and what a worker is given
lies in host memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from awexd_client.held import HeldReader
from awexd_client.streaming import Stream, StreamWriter
from awexd_transports.errors import EpochChanged, InvalidArgument

if TYPE_CHECKING:
    import torch

BACKEND = "awexd"
TIMEOUT = 600.0
"""Seconds: the trainer gathers a whole model while the workers wait for it."""

_ENGINE_KWARGS = "job (needed), socket, engine, keep, verify, timeout"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Master(NamedTuple):
    """What the master says before each update.

    Attributes:
        node: where it runs.
        epoch: of this run of the trainer.
        last: the last step that it has used in it.
    """

    node: str
    epoch: int
    last: int | None

    def step(self, global_steps: int | None) -> int:
        """The step of the update that comes: verl's own where that is given and rises, else the next one."""
        if global_steps is not None and (self.last is None or global_steps > self.last):
            return global_steps
        return 0 if self.last is None else self.last + 1


@CheckpointEngineRegistry.register(BACKEND)  # type: ignore[untyped-decorator, unused-ignore]
class AwexdCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """verl makes one in each actor rank and each rollout worker.

    Args:
        bucket_size: verl's; tensors go one at a time here, whatever it is.
        is_master: verl says so to the actor rank that sends.
        job: of the daemon, ``owner/name``; a bare name is this user's own.
        socket: the daemon's; None: ``$AWEXD_SOCKET``, else the default.
        engine: what the rollout workers' names begin with in ``awexctl status``.
        keep, verify: as for ``WeightWriter`` and ``HeldReader``.
        timeout: seconds that each wait may take; among them, for a worker, the trainer's gathering of the weights.

    Raises:
        InvalidArgument: ``job`` is missing, or an argument is unknown.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        job: str | None = None,
        socket: str | None = None,
        engine: str = "verl",
        keep: int = 2,
        verify: str = "checksum",
        timeout: float = TIMEOUT,
        **unknown: object,
    ) -> None:
        if unknown:
            raise InvalidArgument(
                f"engine_kwargs.{BACKEND} has unknown names: {', '.join(sorted(unknown))}; known: {_ENGINE_KWARGS}"
            )
        if not job or not isinstance(job, str):
            raise InvalidArgument(
                f"engine_kwargs.{BACKEND}.job is missing: the name of the job whose weights these are; "
                f"known: {_ENGINE_KWARGS}"
            )
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.job = job
        self.socket = socket
        self.engine = engine
        self.keep = keep
        self.verify = verify
        self.timeout = float(timeout)
        self._writer: StreamWriter | None = None
        self._reader: HeldReader | None = None
        self._master: Master | None = None
        self._receiving: HeldReader | None = None

    # what verl calls before and after each update

    def prepare(self) -> Master | None:
        """The master's epoch and last step; of the others, nothing. The first call of the master opens the epoch."""
        if not self.is_master:
            return None
        if self._writer is None:
            self._writer = StreamWriter(self.job, self.socket, keep=self.keep, verify=self.verify, timeout=self.timeout)
        return Master(_node(), self._writer.epoch, self._writer.last)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What the master said, for everybody; for each rollout worker its rank among them."""
        said = [found for found in metadata if found is not None]
        if len(said) != 1:
            raise InvalidArgument(f"{len(said)} actor ranks are the master, where one should be")
        actors: dict[str, list[Any]] = {"rank": [None] * actor_wg_world_size, "world_size": [0] * actor_wg_world_size}
        workers: dict[str, list[Any]] = {
            "rank": list(range(rollout_world_size)),
            "world_size": [rollout_world_size] * rollout_world_size,
        }
        return (
            {**actors, "master": said * actor_wg_world_size},
            {**workers, "master": said * rollout_world_size},
        )

    def init_process_group(self, *, rank: int | None, world_size: int, master: Sequence[Any]) -> None:
        """Takes what ``build_topology`` gave. A rollout worker joins the trainer's epoch.

        Raises:
            InvalidArgument: the trainer runs on another node: no version of it will come here.
            EpochChanged: yet another trainer of this job has begun.
        """
        self._master = Master(*master)
        if rank is None:
            return
        if self._master.node != _node():
            raise InvalidArgument(
                f"rollout worker {rank} runs on another node than the trainer's master: awexd moves weights within "
                "one node in this version"
            )
        self._join(f"{self.engine}-{rank}-{os.getpid()}", world_size, self._master.epoch)

    def finalize(self) -> None:
        """Nothing: sessions, mappings and the held versions stay for the next update."""

    # the update

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publishes what the generator brings, if this is the master; takes part in it to its end in any case.

        The generator runs on the calling thread, where its device, stream and grad mode are; copies and waits do not.

        Returns:
            Figures of the master for verl's metrics.
        """
        brought = iter(weights)
        try:
            if not self.is_master:
                return {}
            if self._writer is None or self._master is None:
                raise InvalidArgument("prepare and init_process_group come first")
            stream = await asyncio.to_thread(self._writer.begin, self._master.step(global_steps))
            return await _publish(stream, brought)
        finally:
            await _exhaust(brought)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """The tensors of that version, once it is committed; each is the caller's own.

        Asked for more after the last one, it confirms the version: an update whose version was withdrawn while it was
        read, or whose lease ran out, fails here. Closed early, it gives the version up.

        Raises:
            DeadlineExceeded: it was not published in time.
            IntegrityError: bytes are not what the trainer wrote; they are not yielded.
            VersionUnavailable, EpochChanged, DaemonUnavailable
        """
        if self._reader is None or self._master is None:
            raise InvalidArgument("init_process_group comes first")
        if self._receiving is not None:
            raise InvalidArgument("this worker still receives another version")
        reader, master, touched = self._reader, self._master, False
        self._receiving = reader
        try:
            epoch, step = await asyncio.to_thread(reader.lease, master.step(global_steps), self.timeout)
            if epoch != master.epoch:
                raise EpochChanged(f"{self.job}: step {step} of epoch {epoch} where {master.epoch} was promised")
            tensors = reader.tensors()
            while (found := await asyncio.to_thread(next, tensors, None)) is not None:
                touched = True
                yield found
            await asyncio.to_thread(reader.confirm, self.timeout)
        except BaseException as error:
            self._give_up(reader, error, touched)
            raise
        finally:
            if self._receiving is reader:
                self._receiving = None

    # internals

    def _join(self, name: str, sharing: int, epoch: int) -> None:
        """A worker is an engine of its own: verl drives all of them to one step, and their number may change."""
        reader = self._reader
        if reader is not None and (self._receiving is reader or reader.engine != name):
            reader.close()  # wakes an update that verl has given up and that still waits
            reader = self._reader = None
        if reader is None:
            self._receiving = None
            reader = self._reader = HeldReader(self.job, name, self.socket, verify=self.verify, timeout=self.timeout)
        reader.sharing = sharing
        if reader.joined != epoch:
            found = reader.join(self.timeout)
            if found != epoch:
                raise EpochChanged(f"{self.job}: epoch {found} has begun where {epoch} was promised")

    def _give_up(self, reader: HeldReader, error: BaseException, touched: bool) -> None:
        if isinstance(error, asyncio.CancelledError):
            # Its thread may be waiting for the daemon still, or copying: closing wakes it, or waits for that copy.
            reader.close()
            if self._reader is reader:
                self._reader = None
            return
        why = InvalidArgument("closed before the last tensor") if isinstance(error, GeneratorExit) else error
        reader.release(why, dirty=touched)


async def _publish(stream: Stream, brought: Iterator[tuple[str, torch.Tensor]]) -> dict[str, float]:
    try:
        for name, tensor in brought:
            host = tensor.detach()
            # On this thread, behind whatever filled the tensor in this thread's stream.
            host = host.cpu() if host.device.type != "cpu" else host
            await asyncio.to_thread(stream.put, name, host)
        done = await asyncio.to_thread(stream.finish)
    except BaseException as error:
        await asyncio.to_thread(stream.abort, error)
        raise
    return {"awexd/step": done.step, "awexd/bytes": done.nbytes, "awexd/copy_seconds": done.copy_seconds}


async def _exhaust(brought: Iterator[object]) -> None:
    """Other ranks take part in every tensor: a rank that stopped in the middle would leave them waiting."""
    for _ in brought:
        await asyncio.sleep(0)


def _node() -> str:
    """This machine, since it was started."""
    return _BOOT_ID.read_text().strip()
