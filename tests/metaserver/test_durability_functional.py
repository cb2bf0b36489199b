"""SIGKILL, full disks and damage: what was told is still there, and nothing goes back."""

from __future__ import annotations

import http.client
import json
import random
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from awexd.metaserver.database import NUMBERS_A_START, Database
from awexd.metaserver.model import Record
from awexd_transports.errors import BudgetExceeded, InvalidArgument
from tests.metaserver.servers import Client, Failed, MetaServer

JOB = "alice/grpo"
ROUNDS = 6
Told = list[tuple[int, int]]


def test_no_commit_or_epoch_that_was_told_is_lost_to_sigkill(folder: Path) -> None:
    """One trainer commits step after step and opens epochs; the MetaServer is killed at any moment."""
    chance = random.Random(7)
    told: Told = [(1, -1)]
    life = [0]
    with MetaServer(folder) as server:
        for _ in range(ROUNDS):
            enough = threading.Event()
            writer = threading.Thread(target=_commit_until_it_dies, args=(server, told, enough, life))
            writer.start()
            assert enough.wait(60)
            for _ in range(chance.randrange(2000)):
                pass  # any moment
            server.kill()
            writer.join()
            server.start()
            with Client(server) as client:
                brief = client.call("job", job=JOB)["brief"]
            last = -1 if brief["last_step"] is None else brief["last_step"]
            assert (brief["epoch"], last) >= told[-1]
    assert len(told) > ROUNDS * 10
    assert told == sorted(set(told))
    assert told[-1][0] > 2


def _commit_until_it_dies(server: MetaServer, told: Told, enough: threading.Event, life: list[int]) -> None:
    """``told`` gets what an answer has said, or a watcher was told."""
    try:
        with Client(server) as client, Client(server) as reader:
            client.announce("n0")
            while True:
                life[0] += 1
                who = {"incarnation": f"i{life[0]}"}
                fresh = life[0] > 1
                joined = client.join(JOB, "n0", [0], 1, epoch="new" if fresh else "continue", **who)
                epoch = joined["epoch"]
                told.append((epoch, -1)) if (epoch, -1) > told[-1] else None
                for step in range(15):
                    attempt = client.begin(JOB, "n0", epoch, step, [0])
                    if step % 2:
                        assert client.seal(JOB, "n0", epoch, step, attempt, [0])
                    else:
                        _seal_unread(client, epoch, step, attempt)
                        _await_step(reader, step)
                        client.http.getresponse().read()
                    told.append((epoch, step))
                    if step == 12:
                        enough.set()
    except (OSError, http.client.HTTPException, ValueError):
        return


def _seal_unread(client: Client, epoch: int, step: int, attempt: int) -> None:
    body = {"node": "n0", "run": "run-of-a-test", "epoch": epoch, "step": step, "attempt": attempt}
    text = json.dumps(body | {"pieces": [[0, "a" * 64, 1, True]]})
    path = f"/v1/jobs/{JOB}/seals"
    client.http.request("POST", path, text, {"Content-Type": "application/json"})


def _await_step(reader: Client, step: int) -> None:
    """What a watcher sees counts as told, even before the writer has its answer."""
    after = 0
    while True:
        if step % 4:
            brief: Any = reader.call("watch", job=JOB, query={"after": after})
        else:
            told = reader.call("watch_jobs", {"jobs": [[JOB, after]], "timeout_ms": 30_000})
            brief = told["jobs"][0]["brief"] if told is not None else {"last_step": None, "seq": after}
        if brief["last_step"] == step:
            return
        after = brief["seq"]


def test_a_restarted_metaserver_has_another_run_and_knows_no_node(folder: Path) -> None:
    with MetaServer(folder) as server:
        with Client(server) as client:
            client.announce("n0")
            client.join(JOB, "n0", [0], 1)
            before = client.run
            first = client.begin(JOB, "n0", 1, 0, [0])
        server.kill()
        server.start()
        with Client(server) as client:
            assert client.call("nodes") == {"nodes": []}
            assert client.run != before
            client.announce("n0")
            client.join(JOB, "n0", [0], 1, epoch=1)
            assert client.begin(JOB, "n0", 1, 0, [0]) > first


def test_a_second_metaserver_on_the_same_folder_is_refused(folder: Path, metaserver: MetaServer) -> None:
    with pytest.raises(InvalidArgument, match="in use by another"):
        Database(folder / "metaserver")


def record(**more: Any) -> Record:
    known: dict[str, Any] = {"name": JOB, "epoch": 3, "world_size": 2, "keep": 2, "high": 7}
    return Record(**known | {"commits": ((3, 6, 60, 2), (3, 7, 70, 2))} | more)


def test_what_is_written_is_read_again_and_a_closed_job_is_not(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.write([record(), record(name="a/other", commits=())])
    database.write([record(high=8, commits=((3, 8, 80, 2),))])
    database.close()
    database = Database(tmp_path)
    assert sorted(database.load()) == [record(name="a/other", commits=()), record(high=8, commits=((3, 8, 80, 2),))]
    database.write([record(closed=True)])
    assert [one.name for one in database.load()] == ["a/other"]
    assert (tmp_path / "metaserver.sqlite").stat().st_mode & 0o777 == 0o600
    database.close()


def test_settings_of_sqlite_are_those_that_survive_a_power_cut(tmp_path: Path) -> None:
    database = Database(tmp_path)
    found = [database._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert found == ["wal", 2]
    database.close()


def test_numbers_of_a_start_are_beyond_those_before_also_where_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path)
    first = database.start()
    monkeypatch.setattr("time.time_ns", lambda: 1)
    assert database.start() == first + NUMBERS_A_START
    assert database.start() < 1 << 53
    database.close()


def test_a_write_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.write([record()])
    with pytest.raises(BudgetExceeded):
        database.write([record(high=9), record(name=None)])
    assert database.load() == [record()]
    database.close()


@pytest.mark.parametrize("damage", ["no database", "cut short", "of another format"])
def test_a_damaged_database_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    database = Database(tmp_path)
    database.write([record(name=f"a/{number}") for number in range(200)])
    database.close()
    path = tmp_path / "metaserver.sqlite"
    if damage == "no database":
        path.write_bytes(b"\x80\x04\x95" * 100)
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:6000])
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    with pytest.raises(InvalidArgument, match=r"metaserver\.sqlite"):
        Database(tmp_path)


def test_while_the_disk_takes_nothing_nobody_is_told_and_then_everyone(folder: Path) -> None:
    with MetaServer(folder) as server, Client(server) as client, Client(server) as other:
        client.announce("n0")
        client.join(JOB, "n0", [0], 1)
        attempt = client.begin(JOB, "n0", 1, 0, [0])
        seq = other.call("job", job=JOB)["brief"]["seq"]
        blocker = sqlite3.connect(folder / "metaserver" / "metaserver.sqlite", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")  # it waits for this, and then gives up, again and again
        _seal_unread(client, 1, 0, attempt)
        assert other.call("watch", job=JOB, query={"after": seq, "timeout_ms": 1000}) is None
        assert other.call("jobs")["jobs"][0]["last_step"] is None
        answer = client.http.getresponse()
        assert (answer.status, b"budget_exceeded" in answer.read()) == (507, True)
        blocker.execute("ROLLBACK")
        blocker.close()
        assert other.call("watch", job=JOB, query={"after": seq, "timeout_ms": 30_000})["last_step"] == 0
        assert client.seal(JOB, "n0", 1, 0, attempt, [0])
        with pytest.raises(Failed):
            client.begin(JOB, "n0", 1, 0, [0])
