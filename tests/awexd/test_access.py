from __future__ import annotations

import os
import pwd

import pytest

from awexd.access import Peer, check_control, check_name, check_read, check_write, may_read, qualify, user_name
from awexd.store.model import Job
from awexd_transports.errors import AccessDenied, InvalidArgument

ROOT = Peer(1, 0, 0)
STRANGER = Peer(1, 4242, 4243)
OTHER = Peer(1, 4244, 4245)


def test_bare_name_is_the_callers_own() -> None:
    assert qualify("grpo", ROOT) == "root/grpo"
    assert qualify("grpo", STRANGER) == "uid-4242/grpo"
    assert qualify("uid-4242/grpo", ROOT) == "uid-4242/grpo"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "a/",
        "/a",
        "a/b/c",
        "../x",
        "x/..",
        ".",
        "a b",
        "a\0",
        "a\n",
        "ä",
        "a" * 101,
        "a;b",
        "-a",
        "root/.x",
        "a\\b",
    ],
)
def test_name_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        qualify(name, ROOT)
    if "/" not in name:
        with pytest.raises(InvalidArgument):
            check_name("engine", name)


@pytest.mark.parametrize("name", ["a", "A.b-c_d", "0", "_x", "a" * 100])
def test_name_is_taken(name: str) -> None:
    assert check_name("engine", name) == name
    assert qualify(name, ROOT) == f"root/{name}"


def test_only_the_owner_writes_not_even_root() -> None:
    check_write("uid-4242/j", STRANGER)
    for peer in (OTHER, ROOT):
        with pytest.raises(AccessDenied, match="belongs to uid-4242"):
            check_write("uid-4242/j", peer)


def test_owner_and_administrators_control() -> None:
    for peer in (STRANGER, ROOT, Peer(1, os.geteuid(), 0)):
        check_control("uid-4242/j", peer)
    with pytest.raises(AccessDenied):
        check_control("uid-4242/j", OTHER)


def test_owner_administrators_and_those_granted_read() -> None:
    job = Job("uid-4242/j", 4242)
    assert may_read(job.name, job, STRANGER)
    assert may_read(job.name, None, ROOT)
    assert not may_read(job.name, job, OTHER)
    job.uids.add(OTHER.uid)
    assert may_read(job.name, job, OTHER)
    job.uids.clear()
    job.gids.add(OTHER.gid)
    assert may_read(job.name, job, OTHER)


def test_refusal_names_the_remedy() -> None:
    with pytest.raises(AccessDenied, match=r"writer\.grant\(uids=\[4244\]\)"):
        check_read("uid-4242/j", None, OTHER)


def test_supplementary_groups_count() -> None:
    for record in pwd.getpwall():
        groups = os.getgrouplist(record.pw_name, record.pw_gid)
        if len(groups) > 1:
            job = Job("uid-4242/j", 4242, gids={groups[-1]})
            assert may_read(job.name, job, Peer(1, record.pw_uid, record.pw_gid))
            return
    pytest.skip("no user of this machine is in two groups: `usermod -aG users nobody` makes one")


def test_two_users_never_have_one_name() -> None:
    names = {user_name(uid) for uid in (0, 4242, 4243)}
    assert len(names) == 3
