"""What must outlive the MetaServer: jobs' epochs, last steps and recent commits. SQLite, on disk before anyone is told.

Every method may block: call it from a thread once the loop runs, from one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from awexd.metaserver.model import Record
from awexd_transports.errors import BudgetExceeded, InvalidArgument

FORMAT = 1
BUSY_SECONDS = 5.0
NUMBERS_A_START = 1 << 30
"""That one process gives out at most, where the clock went back between two of them."""

_SCHEMA = """
CREATE TABLE start (first INTEGER NOT NULL) STRICT;
CREATE TABLE jobs (
    name TEXT PRIMARY KEY, epoch INTEGER NOT NULL, world_size INTEGER NOT NULL, keep INTEGER NOT NULL,
    high INTEGER NOT NULL
) STRICT;
CREATE TABLE commits (
    name TEXT NOT NULL, epoch INTEGER NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    world_size INTEGER NOT NULL, PRIMARY KEY (name, epoch, step)
) STRICT;
"""


class Database:
    """The file in ``folder``; one MetaServer a folder.

    Raises:
        InvalidArgument: the folder or file cannot be used, or another MetaServer has it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metaserver.sqlite"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "metaserver.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(f"state directory {folder}: {error.strerror}; choose one with --state-dir") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._connection = self._opened()
        except OSError as error:
            os.close(self._lock)
            raise InvalidArgument(f"{folder} is in use by another MetaServer") from error
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    def start(self) -> int:
        """A number that no attempt or change before this start has, nor any above it; it fits into 53 bits."""
        with self._transaction() as connection:
            row = connection.execute("SELECT first FROM start").fetchone()
            first = max((time.time_ns() // 1_000_000) << 12, row[0] + NUMBERS_A_START if row else 0)
            connection.execute("DELETE FROM start")
            connection.execute("INSERT INTO start VALUES (?)", (first,))
        return int(first)

    def load(self) -> list[Record]:
        commits: dict[str, list[tuple[int, int, int, int]]] = {}
        for name, *commit in self._connection.execute("SELECT * FROM commits"):
            commits.setdefault(name, []).append((commit[0], commit[1], commit[2], commit[3]))
        rows = self._connection.execute("SELECT * FROM jobs").fetchall()
        return [
            Record(name, epoch, world_size, keep, high, tuple(commits.get(name, ())))
            for name, epoch, world_size, keep, high in rows
        ]

    def write(self, records: Iterable[Record]) -> None:
        """All of them, durably, or none.

        Raises:
            BudgetExceeded: the disk does not take them.
        """
        try:
            with self._transaction() as connection:
                for record in records:
                    _write(connection, record)
        except sqlite3.Error as error:
            raise BudgetExceeded(f"{self.path} cannot be written: {error}") from error

    def _opened(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self.path.chmod(0o600)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            (number,) = connection.execute("PRAGMA user_version").fetchone()
            if number == 0:
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
            elif number != FORMAT:
                raise InvalidArgument(f"{self.path} is of format {number}; this version reads {FORMAT}")
            (verdict,) = connection.execute("PRAGMA quick_check").fetchone()
            if verdict != "ok":
                raise InvalidArgument(f"{self.path} is damaged: {verdict}; move it away to start without it")
        except sqlite3.Error as error:
            connection.close()
            raise InvalidArgument(f"{self.path}: {error}; move it away to start without it") from error
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _write(connection: sqlite3.Connection, record: Record) -> None:
    connection.execute("DELETE FROM commits WHERE name = ?", (record.name,))
    if record.closed:
        connection.execute("DELETE FROM jobs WHERE name = ?", (record.name,))
        return
    values = record[:5]
    connection.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)", values)
    rows = [(record.name, *commit) for commit in record.commits]
    connection.executemany("INSERT INTO commits VALUES (?, ?, ?, ?, ?)", rows)
