"""One request at the MetaServer that waits for all jobs which this daemon follows."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from awexd.nodes.metaclient import MetaClient
from awexd_transports.errors import AwexdError, DaemonUnavailable, VersionUnavailable

WAIT_MS = 30_000
ANSWER_SECONDS = WAIT_MS / 1000 + 15.0
MAX_JOBS = 256

_log = logging.getLogger(__name__)

Wanted = tuple[int, "asyncio.Future[dict[str, Any]]"]


class Watching:
    """Asks until cancelled. However many jobs there are, a change of any is told with one answer."""

    def __init__(self, client: MetaClient) -> None:
        self._client = client
        self._wanted: dict[str, Wanted] = {}
        self._more = asyncio.Event()

    @property
    def process(self) -> str:
        """The MetaServer's, whose answer came last."""
        return self._client.run

    async def next(self, job: str, seq: int) -> dict[str, Any]:
        """All that the MetaServer says of the job once it is of another change than ``seq``; 0: at once.

        Raises:
            AwexdError: as the MetaServer says, or it does not.
        """
        wanted: Wanted = seq, asyncio.get_running_loop().create_future()
        self._wanted[job] = wanted
        self._more.set()
        try:
            return await wanted[1]
        finally:
            if self._wanted.get(job) is wanted:
                del self._wanted[job]

    async def run(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            if self._wanted:
                await self._ask(dict(list(self._wanted.items())[:MAX_JOBS]))

    async def _ask(self, wanted: dict[str, Wanted]) -> None:
        """One request; given up when another job is to be in it."""
        body = {"jobs": [[job, seq] for job, (seq, _) in wanted.items()], "timeout_ms": WAIT_MS}
        call = self._client.call("POST", "/v1/watch", body, timeout=ANSWER_SECONDS)
        asking, more = asyncio.ensure_future(call), asyncio.ensure_future(self._more.wait())
        try:
            await asyncio.wait([asking, more], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                self._answer(wanted, asking)
        finally:
            asking.cancel()
            more.cancel()
            await asyncio.gather(asking, more, return_exceptions=True)

    def _answer(self, wanted: dict[str, Wanted], asked: asyncio.Future[Any]) -> None:
        try:
            views = _by_job(asked.result())
        except VersionUnavailable as error:
            absent = error.details.get("absent")
            self._fail(
                {job: wanted[job] for job in absent if job in wanted} if isinstance(absent, list) else wanted, error
            )
        except AwexdError as error:
            self._fail(wanted, error)
        except Exception:  # noqa: BLE001 - a fault of ours ends no daemon
            _log.exception("watching jobs failed")
            self._fail(wanted, AwexdError("watching the job at the MetaServer failed; the daemon's log has more"))
        else:
            for job, view in views.items():
                if job in wanted and not wanted[job][1].done():
                    wanted[job][1].set_result(view)
        self._more.set()  # for the others

    @staticmethod
    def _fail(wanted: dict[str, Wanted], error: AwexdError) -> None:
        for _, future in wanted.values():
            if not future.done():
                future.set_exception(error)


def _by_job(answer: Any) -> dict[str, dict[str, Any]]:
    try:
        return {view["brief"]["job"]: view for view in answer["jobs"]} if answer is not None else {}
    except (KeyError, TypeError) as error:
        raise DaemonUnavailable("the MetaServer answers otherwise than this version expects") from error
