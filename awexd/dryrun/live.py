"""What a job's ranks and engines have registered with the daemon, as a pair to plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from awexd.dryrun.report import Pair, Side
from awexd.manifests import unbundle
from awexd_transports.errors import VersionUnavailable
from awexd_transports.layout import Manifest


def pair_of_job(job: str, socket: str | None, timeout: float) -> Pair:
    """The trainer that is registered, else the newest version, and every engine.

    Raises:
        VersionUnavailable: nothing to plan, or ranks that have not registered, by number.
        AccessDenied, DaemonUnavailable
    """
    from awexd_client.session import Connection, socket_path

    connection = Connection(socket_path(socket))
    try:
        answer, fds = connection.call("manifests", {"job": job}, timeout=timeout)
        try:
            bodies = unbundle(answer["bodies"], fds[0])
        finally:
            for fd in fds:
                os.close(fd)
    finally:
        connection.goodbye()
    known = {digest: Manifest.decode(body, digest) for digest, body in bodies.items()}
    engines = [
        Side(each["engine"], _all(f"engine {each['engine']}", each["world_size"], each["workers"], known))
        for each in answer["engines"]
    ]
    if not engines:
        raise VersionUnavailable(f"{answer['job']}: no engine has registered")
    if answer["writers"]:
        ranks = _all("the trainer", answer["world_size"], answer["writers"], known)
        return Pair(Side(answer["job"], ranks), engines)
    if not answer["segments"]:
        raise VersionUnavailable(f"{answer['job']}: no trainer has registered, and no version is held")
    note = "no trainer is registered: this is the newest version, replicas already dealt out"
    held = [known[digest] for digest in answer["segments"]]
    return Pair(Side(answer["job"], held), engines, segments=True, notes=(note,))


def _all(who: str, count: int, registered: Iterable[tuple[int, str]], known: Mapping[str, Manifest]) -> list[Manifest]:
    found = {rank: known[digest] for rank, digest in registered}
    absent = [rank for rank in range(count) if rank not in found]
    if absent:
        shown = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
        one = len(absent) == 1
        raise VersionUnavailable(
            f"{who}: rank{'' if one else 's'} {shown} of {count} {'has' if one else 'have'} not registered"
        )
    return [found[rank] for rank in range(count)]
