"""The channel by TLS: both sides show certificates; who has none gets nowhere."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from awexd_transports.base import Piece
from awexd_transports.errors import AwexdError
from awexd_transports.ranges import Ranges
from tests.peers.certificates import made, needs_openssl
from tests.peers.nodes import Node, Segment, fetcher
from tests.peers.serving import tls

pytestmark = needs_openssl
MiB = 1 << 20
WITHIN = 60.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate for 127.0.0.1 that is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    return made(folder, "good")


class TestTls:
    transport = "tcp"

    @pytest.mark.parametrize("verify", [True, False])
    async def test_bits_are_equal(
        self, node: Callable[..., Node], segment: Callable[..., Segment], files: dict[str, str], verify: bool
    ) -> None:
        held, into = segment(64 * MiB + 3, 1), segment(64 * MiB + 3)
        source = node("a", {0: held}, tls=files)
        client = tls(files, ssl.Purpose.SERVER_AUTH)
        await fetcher(self.transport, {0: into}, tls=client, streams=2, verify=verify).run([source.source()], WITHIN)
        assert np.array_equal(into.copy(), held.copy())
        into.fill(0)
        rows = Piece(0, 7, 3000 * 4096, 3000, 20_000)
        fetch = fetcher(self.transport, {0: into}, {0: Ranges()}, rows={0: [rows]}, tls=client, verify=verify)
        await fetch.run([source.source()], WITHIN)
        found, there = into.copy(), held.copy()
        for start, end in rows.runs():
            assert np.array_equal(found[start:end], there[start:end])
        assert np.count_nonzero(found) <= rows.nbytes

    async def test_cancel_leaves_nothing_written_later(
        self, node: Callable[..., Node], segment: Callable[..., Segment], files: dict[str, str]
    ) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        source = node("a", {0: held}, tls=files)
        begun = asyncio.Event()
        fetch = fetcher(
            self.transport,
            {0: into},
            tls=tls(files, ssl.Purpose.SERVER_AUTH),
            piece_bytes=MiB,
            arrived=lambda *_: begun.set(),
        )
        running = asyncio.create_task(fetch.run([source.source()], WITHIN))
        await begun.wait()
        running.cancel()
        await asyncio.wait([running])
        into.fill(0x11)
        await asyncio.sleep(0.2)
        assert (into.copy() == 0x11).all()

    @pytest.mark.parametrize("who", ["plain", "without a certificate", "of another authority"])
    async def test_who_shows_no_good_certificate_gets_nothing(
        self,
        node: Callable[..., Node],
        segment: Callable[..., Segment],
        files: dict[str, str],
        tmp_path: Path,
        who: str,
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source = node("a", {0: held}, tls=files)
        shown = {
            "plain": None,
            "without a certificate": {"authority": files["authority"]},
            "of another authority": made(tmp_path, "bad") | {"authority": files["authority"]},
        }[who]
        client = tls(shown, ssl.Purpose.SERVER_AUTH)
        with pytest.raises(AwexdError, match=r"me/grpo \(3, 7\) from a"):
            await fetcher(self.transport, {0: into}, tls=client, retries=0).run([source.source()], WITHIN)
        assert (into.copy() == 0xEE).all()
        good = tls(files, ssl.Purpose.SERVER_AUTH)
        await fetcher(self.transport, {0: into}, tls=good).run([source.source()], WITHIN)

    async def test_source_of_another_authority_is_not_believed(
        self, node: Callable[..., Node], segment: Callable[..., Segment], files: dict[str, str], tmp_path: Path
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        bad = made(tmp_path, "bad")
        source = node("a", {0: held}, tls=bad | {"authority": files["authority"]})
        client = tls(files, ssl.Purpose.SERVER_AUTH)
        with pytest.raises(AwexdError, match="TLS failed"):
            await fetcher(self.transport, {0: into}, tls=client, retries=0).run([source.source()], WITHIN)
