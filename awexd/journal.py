"""What must outlive the daemon beside the segments: its identity, jobs' epochs, manifests. Plain files in one folder.

Every method may block on the disk: call it from a thread once the loop runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from awexd.store.elsewhere import Joined, Mirror
from awexd.store.model import Job
from awexd_transports.errors import BudgetExceeded, InvalidArgument

RECORD_FORMAT = 1
_KEY_BYTES = 32
_NAMESPACE_BYTES = 6


class Journal:
    """The folder of one daemon, named after its socket. Holds a lock on it: one daemon a folder.

    Raises:
        InvalidArgument: the folder cannot be made or written, or another daemon has it.
    """

    def __init__(self, state_dir: Path, socket_path: str) -> None:
        name = hashlib.sha256(os.path.realpath(socket_path).encode()).hexdigest()[:16]
        self.directory = state_dir / name
        try:
            for folder in ("jobs", "manifests"):
                (self.directory / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.directory / "identity", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(
                f"state directory {state_dir}: {error.strerror}; choose one with --state-dir"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise InvalidArgument(f"{self.directory} is in use by another daemon") from error
        self.namespace, self.key = self._identity()

    def close(self) -> None:
        os.close(self._fd)

    def _identity(self) -> tuple[str, bytes]:
        """A random name for this daemon's shared memory, so that it never meets another's, and a key for headers."""
        stored = os.pread(self._fd, 256, 0)
        if len(stored) != _KEY_BYTES + _NAMESPACE_BYTES:
            stored = secrets.token_bytes(_KEY_BYTES + _NAMESPACE_BYTES)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, stored, 0)
            os.fsync(self._fd)
        return stored[_KEY_BYTES:].hex(), stored[:_KEY_BYTES]

    def record(self, job: Job) -> dict[str, Any]:
        """What is kept of a job, as plain values (made on the loop, saved in a thread)."""
        return {
            "format": RECORD_FORMAT,
            "job": job.name,
            "owner_uid": job.owner_uid,
            "epoch": job.epoch,
            "world_size": job.world_size,
            "keep": job.keep,
            # A borrowed version goes with this daemon: its writer may publish the step again to the next.
            "high": min([job.high, *(key[1] - 1 for key, version in job.versions.items() if version.borrowed)]),
            "uids": sorted(job.uids),
            "gids": sorted(job.gids),
            "withdrawn": list(job.withdrawn),
            "mirrored": job.mirror is not None,
            "joined": job.joined is not None,
            "pins": [[*key, sorted(ranks)] for key, ranks in job.pins.items()],
        }

    def save(self, record: dict[str, Any]) -> None:
        """Writes a job's record durably."""
        self._replace(self._job_path(record["job"]), orjson.dumps(record))

    def forget(self, name: str) -> None:
        self._job_path(name).unlink(missing_ok=True)

    def load(self) -> list[Job]:
        """Every recorded job; a record that cannot be read is refused by name."""
        jobs = []
        for path in sorted((self.directory / "jobs").glob("*.json")):
            try:
                record = orjson.loads(path.read_bytes())
                jobs.append(_job(record))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise InvalidArgument(
                    f"{path} is not a job's record ({error}); remove it to start without it"
                ) from error
        return jobs

    def save_phases(self, claims: list[dict[str, Any]]) -> None:
        """Writes who is inside which phase: for a daemon after this one, not for a machine after a crash."""
        temporary = self.directory / "phases.new"
        temporary.write_bytes(orjson.dumps(claims))
        os.replace(temporary, self.directory / "phases")

    def load_phases(self) -> list[dict[str, Any]]:
        """What was written last; nothing where that cannot be read."""
        try:
            found = orjson.loads((self.directory / "phases").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return []
        return [claim for claim in found if isinstance(claim, dict)] if isinstance(found, list) else []

    def save_manifest(self, digest: str, body: bytes) -> None:
        path = self.directory / "manifests" / digest
        if not path.exists():
            self._replace(path, body)

    def load_manifests(self) -> dict[str, bytes]:
        """Manifest bodies by digest, as they were saved."""
        folder = self.directory / "manifests"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".new"}

    def prune_manifests(self, used: Iterable[str]) -> None:
        keep = set(used)
        for path in (self.directory / "manifests").iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def _job_path(self, name: str) -> Path:
        return self.directory / "jobs" / (hashlib.sha256(name.encode()).hexdigest() + ".json")

    def _replace(self, path: Path, body: bytes) -> None:
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.new")
        try:
            with open(temporary, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if isinstance(error, OSError):
                raise BudgetExceeded(f"{path.parent} cannot be written: {error.strerror}") from error
            raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _job(record: dict[str, Any]) -> Job:
    if record["format"] != RECORD_FORMAT:
        raise TypeError(f"format {record['format']}, this version reads {RECORD_FORMAT}")
    numbers = [record[key] for key in ("owner_uid", "epoch", "world_size", "keep")]
    numbers += [record["high"] + 1, *record["uids"], *record["gids"], *record["withdrawn"]]
    numbers += [number for epoch, step, ranks in record.get("pins", ()) for number in (epoch, step, *ranks)]
    if not isinstance(record["job"], str) or any(type(number) is not int or number < 0 for number in numbers):
        raise TypeError("a value of another kind")
    job = Job(
        name=record["job"],
        owner_uid=record["owner_uid"],
        epoch=record["epoch"],
        world_size=record["world_size"],
        keep=record["keep"],
        high=record["high"],
        uids=set(record["uids"]),
        gids=set(record["gids"]),
    )
    job.withdrawn.extend(record["withdrawn"])
    job.mirror = Mirror() if record.get("mirrored") is True else None
    job.joined = Joined() if job.mirror is not None and record.get("joined") is True else None
    job.pins = {(epoch, step): set(ranks) for epoch, step, ranks in record.get("pins", ())}
    return job
