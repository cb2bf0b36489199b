"""Who may do what, by the user and groups that the kernel reports for a connection; never by pid or by name sent."""

from __future__ import annotations

import functools
import os
import pwd
import re
from dataclasses import dataclass

from awexd.store.model import Job
from awexd_transports.errors import AccessDenied, InvalidArgument

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, as SO_PEERCRED reports it."""

    pid: int
    uid: int
    gid: int
    supplementary: frozenset[int] | None = None
    """The process's own further groups; None where the kernel does not tell: then the user's."""

    @property
    def groups(self) -> frozenset[int]:
        if self.supplementary is not None:
            return self.supplementary | {self.gid}
        try:
            record = pwd.getpwuid(self.uid)
        except KeyError:
            return frozenset({self.gid})
        return frozenset({self.gid, *os.getgrouplist(record.pw_name, self.gid)})

    @property
    def admin(self) -> bool:
        """root, or the user that the daemon itself runs as."""
        return self.uid in (0, os.geteuid())


@functools.lru_cache(maxsize=4096)  # a look-up may ask another host
def user_name(uid: int) -> str:
    """The name under which that user's jobs stand: ``uid-N`` where there is none, or none that fits."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid-{uid}"
    return name if _PART.fullmatch(name) and not name.startswith("uid-") else f"uid-{uid}"


@functools.lru_cache(maxsize=4096)
def owner_uid(name: str) -> int | None:
    """The user whose jobs stand under the owner's name of ``owner/name`` on this node; None: nobody."""
    owner = name.split("/")[0]
    number = owner.removeprefix("uid-")
    if number != owner:
        return int(number) if number.isdecimal() else None
    try:
        return pwd.getpwnam(owner).pw_uid
    except KeyError:
        return None


def qualify(name: str, peer: Peer) -> str:
    """``owner/name``; a bare name is the caller's own.

    Raises:
        InvalidArgument: not such a name.
    """
    owner, slash, rest = name.rpartition("/")
    qualified = f"{owner}/{rest}" if slash else f"{user_name(peer.uid)}/{name}"
    parts = qualified.split("/")
    if len(parts) != 2 or not all(_PART.fullmatch(part) for part in parts):
        raise InvalidArgument(
            f"job {name!r}: a job is NAME or OWNER/NAME; each 1 to 100 of letters, digits, '.', '_', '-', no '.' first"
        )
    return qualified


def check_name(kind: str, name: str) -> str:
    """An engine's name.

    Raises:
        InvalidArgument: not such a name.
    """
    if not _PART.fullmatch(name):
        raise InvalidArgument(f"{kind} {name!r}: letters, digits, '.', '_' and '-' (100 at most, no leading '.')")
    return name


def check_write(name: str, peer: Peer) -> None:
    """Only a job's owner writes it, registers as its trainer or grants reading.

    Raises:
        AccessDenied: the caller is another user.
    """
    owner = name.split("/")[0]
    if owner != user_name(peer.uid):
        raise AccessDenied(f"job {name} belongs to {owner}; user {user_name(peer.uid)} may not write it")


def check_control(name: str, peer: Peer) -> None:
    """A job's owner and administrators may drop, roll back and close it.

    Raises:
        AccessDenied: the caller is neither.
    """
    if not peer.admin:
        check_write(name, peer)


def may_read(name: str, job: Job | None, peer: Peer) -> bool:
    if peer.admin or name.split("/")[0] == user_name(peer.uid):
        return True
    return job is not None and (peer.uid in job.uids or bool(job.gids & peer.groups))


def check_read(name: str, job: Job | None, peer: Peer) -> None:
    """A job's owner, administrators and those whom the owner has granted it may read it.

    Raises:
        AccessDenied: the caller is none of them (or there is no such job: the two are not told apart).
    """
    if not may_read(name, job, peer):
        raise AccessDenied(
            f"user {user_name(peer.uid)} may not read job {name}; its owner grants it: writer.grant(uids=[{peer.uid}])"
        )
