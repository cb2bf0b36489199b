"""Clients that go away in the middle of what is written to disk."""

from __future__ import annotations

from awexd.protocol import encode
from awexd_client.session import Connection
from tests.attacks.raw import RawWriter
from tests.daemons import Daemon


def test_save_of_a_client_that_went_away_does_not_undo_a_later_one(daemon: Daemon) -> None:
    with RawWriter(daemon.socket) as trainer:
        trainer.register()
        for uid in range(1000, 1040):
            gone = Connection(daemon.socket)
            gone._send(_grant(uid), (), 1e12)
            gone.close()
            trainer.call("job.grant", job="j", uids=[uid + 1000], gids=[])
    daemon.kill()
    daemon.start()
    with RawWriter(daemon.socket) as trainer:
        granted = trainer.call("job.grant", job="j", uids=[], gids=[])["uids"]
    assert set(range(2000, 2040)) <= set(granted)


def _grant(uid: int) -> bytes:
    arguments = {"job": "j", "uids": [uid], "gids": []}
    return encode({"id": 1, "op": "job.grant", "args": arguments, "deadline_ms": 10_000})
