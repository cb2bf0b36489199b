"""Held bytes or live tensors that are not what was written: found, told, and right again after a retry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from awexd_client import IntegrityError, WeightWriter, WorkerWeightsReader
from awexd_transports import copy as copying
from awexd_transports.copy import CopyTable
from awexd_transports.segment import checksums_at
from tests.client.samples import weights
from tests.daemons import Daemon

HALF_READER = """
import sys, torch
from awexd_client import IntegrityError, Shard, WorkerWeightsReader

with WorkerWeightsReader("grpo", "e", 0, 1, sys.argv[1], verify="checksum") as reader:
    whole = torch.zeros(64, 600)
    halves = [Shard("a", whole[:, :101], (64, 600), (0, 0)), Shard("a", whole[:, 101:], (64, 600), (0, 101))]
    reader.register([*halves, Shard("b", torch.zeros(5))])
    try:
        reader.update()
    except IntegrityError as error:
        print("IntegrityError", error)
    else:
        assert torch.equal(whole, torch.arange(64 * 600, dtype=torch.float32).view(64, 600))
    print(reader.state, reader.version)
"""


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
    def test_case_2_9_10_perturbed_byte_is_found_and_never_confirmed(
        self, daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader, name: str
    ) -> None:
        """It is found in the copy's own pass, so the live tensors have been touched by then."""
        into = weights(0)
        writer.register(weights(1))
        reader.register(into)
        writer.publish(1)
        self.flip(daemon, name, writer)
        for _ in range(2):  # trying again does not make it right
            with pytest.raises(IntegrityError, match=f"^{name} .*held are not those that rank 0 wrote"):
                reader.update()
            assert (reader.state, reader.version) == ("dirty", None)
        writer.publish(2)
        assert reader.update(2).step == 2
        assert (reader.state, reader.version) == ("ready", (1, 2))
        assert all(torch.equal(into[name], tensor) for name, tensor in weights(1).items())

    def test_case_2_perturbed_table_of_checksums(
        self, daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader
    ) -> None:
        writer.register(weights(1))
        reader.register(weights(0))
        writer.publish(1)
        (segment,) = self.held(daemon)
        with open(segment, "r+b") as file:
            file.seek(checksums_at(writer._segment.manifest))
            file.write(bytes(8))
        with pytest.raises(IntegrityError, match=r"^a "):
            reader.update()
        assert reader.state == "dirty"

    def test_case_2_found_by_a_reader_in_another_process(self, daemon: Daemon, writer: WeightWriter) -> None:
        """Of a tensor whose two halves, of odd widths, are separate shards."""
        tensor = torch.arange(64 * 600, dtype=torch.float32).view(64, 600)
        writer.register({"a": tensor, "b": torch.arange(5.0)})
        writer.publish(1)
        self.flip(daemon, "a", writer)
        told = subprocess.run(
            [sys.executable, "-c", HALF_READER, daemon.socket], capture_output=True, text=True, timeout=60, check=True
        )
        assert told.stdout.split("\n")[:2] == [
            "IntegrityError a [0:64, 0:150]: the bytes that are held are not those that rank 0 wrote",
            "dirty None",
        ]
        writer.publish(2)
        told = subprocess.run(
            [sys.executable, "-c", HALF_READER, daemon.socket], capture_output=True, text=True, timeout=60, check=True
        )
        assert told.stdout == "ready (1, 2)\n"

    @pytest.mark.usefixtures("without_library")
    @pytest.mark.parametrize("summed", [True, False])
    def test_case_1_destination_changed_during_the_update(
        self, daemon: Daemon, reader: WorkerWeightsReader, monkeypatch: pytest.MonkeyPatch, summed: bool
    ) -> None:
        """Memory that does not keep what was copied: `dirty`, and ready again after a retry."""
        into = weights(0)
        with WeightWriter("grpo", 0, 1, daemon.socket, verify="checksum" if summed else "off") as writer:
            writer.register(weights(1))
            reader.register(into)
            writer.publish(1)
        copy = copying._copy_all

        def copy_and_lose(*tensors: list[torch.Tensor]) -> None:
            copy(*tensors)
            into["a"][4, 1] = 77

        with monkeypatch.context() as patched:
            patched.setattr(copying, "_copy_all", copy_and_lose)
            with pytest.raises(IntegrityError, match=r"^a .*differs after the copy"):
                reader.update()
        assert (reader.state, reader.version) == ("dirty", None)
        assert reader.update().step == 1
        assert (reader.state, reader.version) == ("ready", (1, 1))

    @pytest.mark.usefixtures("without_library")
    @pytest.mark.parametrize("lost", ["table", "tiles"])
    def test_case_9_stale_destination_never_passes(
        self, writer: WeightWriter, reader: WorkerWeightsReader, monkeypatch: pytest.MonkeyPatch, lost: str
    ) -> None:
        writer.register(weights(1))
        reader.register(weights(0))
        writer.publish(1)
        with monkeypatch.context() as patched:
            if lost == "table":
                patched.setattr(CopyTable, "run", lambda table, *args, **kwargs: None)
            else:
                patched.setattr(copying, "_copy_all", lambda destinations, sources: None)
            with pytest.raises(IntegrityError):
                reader.update()
        assert reader.state == "dirty"

    @pytest.mark.parametrize(("stored", "compared"), [("checksum", "off"), ("off", "checksum"), ("off", "off")])
    def test_held_bytes_are_checked_only_where_both_sides_ask(self, daemon: Daemon, stored: str, compared: str) -> None:
        with WeightWriter("grpo", 0, 1, daemon.socket, verify=stored) as writer:
            writer.register(weights(1))
            writer.publish(1)
            self.flip(daemon, "a", writer)
            with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket, verify=compared) as reader:
                reader.register(weights(0))
                assert reader.update().step == 1

    def test_checksums_are_on_unless_turned_off(self, daemon: Daemon) -> None:
        with (
            WeightWriter("grpo", 0, 1, daemon.socket) as writer,
            WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
        ):
            writer.register(weights(1))
            reader.register(weights(0))
            writer.publish(1)
            self.flip(daemon, "a", writer)
            with pytest.raises(IntegrityError, match=r"^a .*held are not those"):
                reader.update()
