"""Held bytes or live tensors that are not what was written: found, told, and right again after a retry."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from awexd_client import (
    IntegrityError,
    WeightWriter,
    WorkerWeightsReader,
)
from tests.client.samples import weights
from tests.daemons import Daemon


class TestCorruption:
    """Held bytes that are no longer those that were written."""

    def flip(self, daemon: Daemon, name: str, writer: WeightWriter) -> None:
        manifest = writer._segment.manifest
        piece = next(number for number, entry in enumerate(manifest.pieces) if entry.tensor.name == name)
        (segment,) = self.held(daemon)
        with open(segment, "r+b") as file:
            file.seek(4096 + manifest.piece_offsets[piece] + 3)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))

    def held(self, daemon: Daemon) -> list[Path]:
        paths = [Path("/dev/shm") / name for name in daemon.segments()]
        return [path for path in paths if path.read_bytes()[:8] == b"AWEXDSEG"]

    @pytest.mark.parametrize("name", ["a", "b"])
    def test_case_2_9_10_perturbed_byte_is_found_before_anything_is_touched(
        self, daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader, name: str
    ) -> None:
        into = weights(0)
        writer.register(weights(1))
        reader.register(into)
        writer.publish(1)
        self.flip(daemon, name, writer)
        with pytest.raises(IntegrityError, match=f"^{name}: .*rank 0"):
            reader.update()
        assert (reader.state, reader.version) == ("empty", None)
        assert all(not tensor.any() for tensor in into.values())
        writer.publish(2)
        assert reader.update(2).step == 2
        assert (reader.state, reader.version) == ("ready", (1, 2))

    def test_case_1_destination_changed_during_the_update(
        self, writer: WeightWriter, reader: WorkerWeightsReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory that does not keep what was copied: `dirty`, and ready again after a retry."""
        from awexd_transports.copy import CopyTable

        into = weights(0)
        writer.register(weights(1))
        reader.register(into)
        writer.publish(1)
        run = CopyTable.run

        def run_and_lose(table: CopyTable, *args: Any, **kwargs: Any) -> Any:
            done = run(table, *args, **kwargs)
            into["a"][4, 1] = 77
            return done

        with monkeypatch.context() as patched:
            patched.setattr(CopyTable, "run", run_and_lose)
            with pytest.raises(IntegrityError, match=r"a differs from epoch 1 step 1 .*\[4, 1\]"):
                reader.update()
        assert (reader.state, reader.version) == ("dirty", None)
        assert reader.update().step == 1
        assert (reader.state, reader.version) == ("ready", (1, 1))

    def test_case_9_stale_destination_never_passes(
        self, writer: WeightWriter, reader: WorkerWeightsReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from awexd_transports.copy import CopyTable

        writer.register(weights(1))
        reader.register(weights(0))
        writer.publish(1)
        with monkeypatch.context() as patched:
            patched.setattr(CopyTable, "run", lambda table, *args, **kwargs: None)
            with pytest.raises(IntegrityError):
                reader.update()
        assert reader.state == "dirty"
