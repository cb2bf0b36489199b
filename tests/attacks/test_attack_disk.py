"""A state folder that is full: refused in plain words, nothing half done, served again once there is room."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from awexd_transports.errors import AwexdError
from tests.attacks.raw import RawWriter, writer
from tests.daemons import Daemon

SMALL_STATE = 'mkdir "$STATE" && mount -t tmpfs -o size=64k tmpfs "$STATE" && exec "$0" "$@"'


def _may_mount() -> bool:
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not _may_mount(), reason="a small state folder needs root and mount namespaces")


def _state(daemon: Daemon) -> Path:
    """The folder as the daemon sees it, in its own mount namespace."""
    return Path(f"/proc/{daemon.pid}/root{daemon.state_dir}")


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


@pytest.mark.parametrize("body", [b"small", b"x" * 100_000])
def test_full_state_folder_is_told_and_the_next_registration_is_recorded(folder: Path, body: bytes) -> None:
    wrapper = ("env", f"STATE={folder / 'state'}", "unshare", "-m", "sh", "-c", SMALL_STATE)
    with Daemon(folder, wrapper=wrapper) as daemon:
        arguments = {"job": "j", "rank": 0, "world_size": 1, "epoch": "new", "keep": 1}
        with writer(daemon.socket, "other") as other:
            _fill(_state(daemon) / "fill")
            with RawWriter(daemon.socket) as trainer:
                error = trainer.refused("write.register", body=body, **arguments)
                assert type(error) is not AwexdError, f"not in plain words: {error}"
                assert "No space left" in str(error)
                other.publish(1)
                (_state(daemon) / "fill").unlink()
                if len(body) < 64 << 10:
                    epoch = trainer.call("write.register", body=body, **arguments)["epoch"]
                    records = [path.read_text() for path in _state(daemon).glob("*/jobs/*.json")]
                    assert any('"root/j"' in text and f'"epoch":{epoch}' in text for text in records)
