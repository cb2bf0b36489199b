from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from awexd.journal import Journal
from awexd.store.model import Job
from awexd_transports.errors import InvalidArgument


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path, "/run/s")
    yield made
    made.close()


def again(journal: Journal, tmp_path: Path) -> Journal:
    journal.close()
    return Journal(tmp_path, "/run/s")


def test_identity_is_made_once_and_is_the_folders(journal: Journal, tmp_path: Path) -> None:
    other = Journal(tmp_path, "/run/t")
    assert other.namespace != journal.namespace
    assert other.key != journal.key
    other.close()
    fresh = again(journal, tmp_path)
    assert (fresh.namespace, fresh.key) == (journal.namespace, journal.key)
    fresh.close()
    journal.__init__(tmp_path, "/run/s")  # type: ignore[misc]


def test_key_is_readable_by_the_owner_alone(journal: Journal) -> None:
    assert stat.S_IMODE((journal.directory / "identity").stat().st_mode) == 0o600


def test_second_daemon_of_one_folder_is_refused(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="in use by another daemon"):
        Journal(tmp_path, "/run/s")


def test_path_through_a_link_is_the_same_daemon(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    first = Journal(tmp_path / "state", str(tmp_path / "real/s"))
    with pytest.raises(InvalidArgument, match="in use"):
        Journal(tmp_path / "state", str(tmp_path / "link/s"))
    first.close()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"file: .*--state-dir"):
        Journal(tmp_path / "file", "/run/s")


def test_job_comes_back_as_it_was_saved(journal: Journal) -> None:
    job = Job("root/j", 0, epoch=3, world_size=8, keep=2, high=57, uids={1, 2}, gids={3})
    journal.save(journal.record(job))
    (found,) = journal.load()
    assert journal.record(found) == journal.record(job)
    assert (found.epoch, found.high, found.uids, found.gids) == (3, 57, {1, 2}, {3})
    job.high = 58
    journal.save(journal.record(job))
    assert [found.high for found in journal.load()] == [58]
    journal.forget("root/j")
    journal.forget("root/j")
    assert journal.load() == []


def test_name_of_a_job_never_reaches_the_file_system(journal: Journal) -> None:
    journal.save(journal.record(Job("../../x/../y", 0)))
    (path,) = (journal.directory / "jobs").iterdir()
    assert path.stem.isalnum()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"job":"root/j"}', b'{"job":1,"uids":5}', b"\xff"])
def test_record_that_is_none_is_refused_naming_its_file(journal: Journal, body: bytes) -> None:
    path = journal.directory / "jobs" / "broken.json"
    path.write_bytes(body)
    with pytest.raises(InvalidArgument, match=r"broken\.json is not a job's record"):
        journal.load()


@pytest.mark.parametrize(
    ("key", "value"),
    [("epoch", "1"), ("epoch", None), ("epoch", -1), ("high", "x"), ("uids", ["a"]), ("world_size", 1.5), ("job", 7)],
)
def test_record_with_a_value_of_another_kind_is_refused(journal: Journal, key: str, value: object) -> None:
    record = journal.record(Job("root/j", 0, epoch=1, world_size=1, keep=1)) | {key: value}
    record_path = journal.directory / "jobs" / "odd.json"
    record_path.write_bytes(orjson.dumps(record))
    with pytest.raises(InvalidArgument, match=r"odd\.json"):
        journal.load()


def test_half_written_record_of_a_killed_daemon_does_not_count(journal: Journal) -> None:
    journal.save(journal.record(Job("root/j", 0, epoch=1)))
    (path,) = (journal.directory / "jobs").iterdir()
    path.with_suffix(".abcd.new").write_bytes(b'{"half')
    assert [job.epoch for job in journal.load()] == [1]


def test_record_is_replaced_whole_or_not_at_all(journal: Journal, tmp_path: Path) -> None:
    journal.save(journal.record(Job("root/j", 0, epoch=1)))
    folder = journal.directory / "jobs"
    inode = next(folder.iterdir()).stat().st_ino
    journal.save(journal.record(Job("root/j", 0, epoch=2)))
    (path,) = folder.iterdir()
    assert path.stat().st_ino != inode


def test_manifests_are_kept_by_digest_until_pruned(journal: Journal) -> None:
    journal.save_manifest("aa", b"one")
    journal.save_manifest("bb", b"two")
    journal.save_manifest("aa", b"one")
    assert journal.load_manifests() == {"aa": b"one", "bb": b"two"}
    (journal.directory / "manifests" / "cc.1234.new").write_bytes(b"half")
    journal.prune_manifests(["bb"])
    assert journal.load_manifests() == {"bb": b"two"}
    assert len(os.listdir(journal.directory / "manifests")) == 1


def test_damaged_identity_is_replaced_rather_than_used(journal: Journal, tmp_path: Path) -> None:
    (journal.directory / "identity").write_bytes(b"short")
    fresh = again(journal, tmp_path)
    assert len(fresh.key) == 32
    assert fresh.key != journal.key
    fresh.close()
    journal.__init__(tmp_path, "/run/s")  # type: ignore[misc]
