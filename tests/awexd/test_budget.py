from __future__ import annotations

import os
from pathlib import Path

import pytest

from awexd.budget import MARGIN_BYTES, Budget
from awexd_transports.errors import BudgetExceeded

GIB = 1 << 30


class Machine:
    """A /proc and a cgroup tree, as files."""

    def __init__(self, folder: Path, available_kib: int = 64 << 20) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()
        (self.proc / "meminfo").write_text(f"MemTotal:  99999999 kB\nMemAvailable:  {available_kib} kB\n")

    def belongs(self, text: str) -> None:
        (self.proc / "self/cgroup").write_text(text)

    def v2(self, path: str, limit: str, usage: int, **stat: int) -> None:
        files: dict[str, object] = {"memory.max": limit, "memory.current": usage}
        self._write(self.cgroups / path, files, stat)

    def v1(self, path: str, limit: int, usage: int, **stat: int) -> None:
        files: dict[str, object] = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage}
        self._write(self.cgroups / "memory" / path, files, stat)

    def _write(self, folder: Path, files: dict[str, object], stat: dict[str, int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))

    def rooms(self, limit: int | None = None, used: int = 0) -> dict[str, int]:
        return dict(Budget(limit, self.proc, self.cgroups).rooms(used))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_available_memory_less_a_margin(machine: Machine) -> None:
    assert machine.rooms()["available memory"] == 64 * GIB - MARGIN_BYTES
    assert "cgroup" not in machine.rooms()
    assert "memory budget" not in machine.rooms()


def test_given_limit_counts_what_is_used(machine: Machine) -> None:
    assert machine.rooms(10 * GIB, used=3 * GIB)["memory budget"] == 7 * GIB


def test_room_in_dev_shm_is_a_bound(machine: Machine) -> None:
    shm = os.statvfs("/dev/shm")
    assert machine.rooms()["/dev/shm"] <= shm.f_blocks * shm.f_frsize


def test_cgroup_v2_limit_less_what_cannot_be_reclaimed(machine: Machine) -> None:
    machine.belongs("0::/pod\n")
    machine.v2("pod", str(8 * GIB), 6 * GIB, anon=GIB, active_file=2 * GIB, inactive_file=GIB, shmem=GIB)
    assert machine.rooms()["cgroup"] == 8 * GIB - 3 * GIB - MARGIN_BYTES


def test_cgroup_v2_tightest_ancestor_counts(machine: Machine) -> None:
    machine.belongs("0::/slice/pod/container\n")
    machine.v2("slice", str(16 * GIB), 15 * GIB)
    machine.v2("slice/pod", "max", GIB)
    machine.v2("slice/pod/container", str(8 * GIB), GIB)
    assert machine.rooms()["cgroup"] == GIB - MARGIN_BYTES


def test_cgroup_v2_without_limits_is_no_bound(machine: Machine) -> None:
    machine.belongs("0::/pod\n")
    machine.v2("pod", "max", GIB)
    assert "cgroup" not in machine.rooms()


def test_cgroup_v2_at_the_root_of_a_namespace(machine: Machine) -> None:
    machine.belongs("0::/\n")
    machine.v2("", str(4 * GIB), GIB)
    assert machine.rooms()["cgroup"] == 3 * GIB - MARGIN_BYTES


def test_cgroup_v2_path_that_leads_out_of_the_namespace_ends(machine: Machine) -> None:
    machine.belongs("0::/../../other\n")
    machine.v2("", str(4 * GIB), GIB)
    assert machine.rooms()["cgroup"] == 3 * GIB - MARGIN_BYTES


def test_cgroup_v1_uses_its_memory_controller_and_the_totals_of_its_tree(machine: Machine) -> None:
    machine.belongs("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/y\n")
    machine.v1("docker/abc", 8 * GIB, 6 * GIB, active_file=1, total_active_file=GIB, total_inactive_file=GIB)
    assert machine.rooms()["cgroup"] == 8 * GIB - 4 * GIB - MARGIN_BYTES


def test_cgroup_v1_without_a_limit_is_no_bound(machine: Machine) -> None:
    machine.belongs("4:memory:/\n")
    machine.v1("", 9223372036854771712, GIB)
    assert "cgroup" not in machine.rooms()


def test_cgroup_v1_mounted_at_the_container_is_found_at_its_root(machine: Machine) -> None:
    machine.belongs("4:memory:/docker/abc\n")  # the host's path; the mount shows the container's own group
    machine.v1("", 2 * GIB, GIB)
    assert machine.rooms()["cgroup"] == GIB - MARGIN_BYTES


def test_hybrid_machine_takes_the_tighter_of_both(machine: Machine) -> None:
    machine.belongs("4:memory:/a\n0::/b\n")
    machine.v1("a", 8 * GIB, GIB)
    machine.v2("b", str(4 * GIB), GIB)
    assert machine.rooms()["cgroup"] == 3 * GIB - MARGIN_BYTES


def test_cgroup_with_odd_files_is_no_bound(machine: Machine) -> None:
    machine.belongs("0::/pod\n")
    machine.v2("pod", "lots", GIB)
    assert "cgroup" not in machine.rooms()


def test_proc_without_cgroups_is_no_bound(machine: Machine) -> None:
    assert "cgroup" not in machine.rooms()


def test_old_kernel_without_mem_available_counts_the_whole_memory(machine: Machine) -> None:
    (machine.proc / "meminfo").write_text("MemTotal: 1 kB\n")
    assert machine.rooms()["available memory"] > 0


def test_what_does_not_fit_is_refused_with_numbers_and_a_remedy(machine: Machine) -> None:
    budget = Budget(10 << 20, machine.proc, machine.cgroups)
    budget.check(4 << 20, 6 << 20)
    with pytest.raises(BudgetExceeded, match=r"4\.0 MiB .*7\.0 MiB are in use; .*memory budget 3\.0 MiB") as failure:
        budget.check(4 << 20, 7 << 20)
    assert "--memory-budget" in str(failure.value)
    assert failure.value.details == {"needed": 4 << 20, "available": 3 << 20, "used": 7 << 20}
    assert isinstance(failure.value, MemoryError)


def test_overdrawn_budget_has_no_room_rather_than_less_than_none(machine: Machine) -> None:
    assert Budget(GIB, machine.proc, machine.cgroups).available(2 * GIB) == 0


def test_this_machine_has_room() -> None:
    assert Budget().available(0) > 0
