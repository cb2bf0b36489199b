"""How much host memory segments may take: what is free now, within what the administrator allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from awexd_transports.errors import BudgetExceeded

MARGIN_BYTES = 128 << 20
"""Left to the rest of the machine, beyond what segments take."""
SHM_DIRECTORY = "/dev/shm"


class Budget:
    """``limit``: total bytes that segments may take; None: what memory and cgroup leave at the time of asking."""

    def __init__(self, limit: int | None = None, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        self.limit = limit
        self._proc = proc
        self._cgroups = cgroups

    def check(self, needed: int, used: int, promised: int = 0) -> None:
        """Refuses what does not fit; ``promised`` bytes are being reserved for others and may not be in use yet.

        Raises:
            BudgetExceeded: with both numbers.
        """
        room = min(room for _, room in self.rooms(used)) - promised
        if needed > room:
            raise BudgetExceeded(
                f"{_mib(needed)} of shared memory are needed; {self.explain(used)}. Fewer kept versions (keep=), "
                "`awexctl drop` or a larger --memory-budget make room",
                {"needed": needed, "available": room, "used": used},
            )

    def available(self, used: int) -> int:
        return max(0, min(room for _, room in self.rooms(used)))

    def explain(self, used: int) -> str:
        parts = [f"{name} {_mib(max(0, room))}" for name, room in self.rooms(used)]
        return f"{_mib(used)} are in use; room left: " + ", ".join(parts)

    def rooms(self, used: int) -> Iterator[tuple[str, int]]:
        """Each bound's name and the bytes it leaves for more segments."""
        if self.limit is not None:
            yield "memory budget", self.limit - used
        yield "available memory", self._mem_available() - MARGIN_BYTES
        headroom = self._cgroup_headroom()
        if headroom is not None:
            yield "cgroup", headroom - MARGIN_BYTES
        shm = os.statvfs(SHM_DIRECTORY)
        yield SHM_DIRECTORY, shm.f_bavail * shm.f_frsize

    def _mem_available(self) -> int:
        for line in (self._proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def _cgroup_headroom(self) -> int | None:
        rooms = [room for directory in self._cgroup_directories() if (room := _headroom(directory)) is not None]
        return min(rooms, default=None)

    def _cgroup_directories(self) -> Iterator[Path]:
        """The memory cgroup of this process and its ancestors, for cgroup v2 and v1."""
        try:
            lines = (self._proc / "self/cgroup").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = self._cgroups / "memory" if controllers else self._cgroups
            here = root / path.lstrip("/")
            while True:
                yield here
                if here in (root, here.parent):
                    break
                here = here.parent


def _headroom(directory: Path) -> int | None:
    """Limit minus what cannot be reclaimed (usage without file pages that can be dropped)."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit_text = (directory / limit_name).read_text().strip()
            limit = 1 << 62 if limit_text == "max" else int(limit_text)
            usage = int((directory / usage_name).read_text())
            stat = dict(line.split(None, 1) for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit >= 1 << 60:
            return None
        # Shared memory stands on the anonymous lists: what is on the file lists can be dropped.
        names = ("active_file", "inactive_file")
        reclaimable = sum(int(stat.get(f"total_{name}", stat.get(name, "0"))) for name in names)
        return limit - max(0, usage - reclaimable)
    return None


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
