"""Daemons that are told how to bring bytes: by rdma, over UCX's TCP where there is no device; by TLS."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from awexd.rdma.available import UCX_TLS, devices, module
from tests.daemons import Daemon
from tests.e2e.exchange_node import Crew
from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import Cluster, Engine, Trainer, job_of, texts, until
from tests.peers.certificates import made, needs_openssl

Forks = Callable[[int], list[Process]]
RDMA = ("--peer-transport", "rdma")
needs_nixl = pytest.mark.skipif(module() is None, reason="needs NIXL: pip install 'awexd[rdma]'")


@pytest.fixture
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UCX_TLS, os.environ.get("AWEXD_TEST_UCX_TLS", "tcp"))


def sidecars(daemon: Daemon) -> list[int]:
    pids = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    return [int(pid) for pid in pids if "awexd.rdma.sidecar" in Path(f"/proc/{pid}/cmdline").read_text()]


def shown(daemon: Daemon) -> str:
    command = [sys.executable, "-m", "awexd.ctl", "status", "--socket", daemon.socket]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@needs_nixl
@pytest.mark.usefixtures("by_tcp")
def test_rdma_brings_every_bit_and_its_sidecars_may_die(folder: Path, forks: Forks) -> None:
    with Cluster(folder) as cluster:
        for name in "abc":
            cluster.add(name, *RDMA)
        trainer = Trainer(forks(2), cluster["a"])
        engines = [Engine(forks(2), cluster["b"], "e-b"), Engine(forks(1), cluster["c"], "e-c")]
        faults = {2: ("a", signal.SIGKILL), 3: ("b", signal.SIGKILL), 4: ("c", signal.SIGSTOP)}
        for step in range(1, 6):
            for number in sidecars(cluster[faults[step][0]]) if step in faults else []:
                os.kill(number, faults[step][1])
            trainer.publish(step)
            for engine in engines:
                engine.update(step)
        assert job_of(cluster["b"].ask("status"), "j")["elsewhere"]["route"] == "rdma"
        assert "route from node a: rdma, " in shown(cluster["b"])
        before = sidecars(cluster["a"])
        assert before
        cluster["a"].kill()
        for pid in before:  # its daemon's death is its own
            assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()
        cluster["a"].start()
        assert all("Traceback" not in cluster[name].log() for name in "abc")


@needs_nixl
@pytest.mark.usefixtures("by_tcp")
def test_rdma_that_the_source_does_not_serve_is_said(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a") as cluster:
        cluster.add("b", *RDMA)
        trainer, engine = Trainer(forks(1), cluster["a"]), Engine(forks(1), cluster["b"])
        trainer.publish(1)
        engine.fails("reader.update(1, timeout=3)", "DeadlineExceeded", "step 1 of epoch 1 to be brought here")
        assert any("does not serve by rdma" in text for text in texts(cluster["b"], "failed"))


@needs_nixl
@pytest.mark.usefixtures("by_tcp")
def test_node_that_only_does_tcp_is_served_by_one_that_does_both(folder: Path, forks: Forks) -> None:
    with Cluster(folder) as cluster:
        cluster.add("a", *RDMA)
        cluster.add("b", "--peer-transport", "tcp")
        trainer, engine = Trainer(forks(1), cluster["a"]), Engine(forks(1), cluster["b"])
        trainer.publish(1)
        engine.update(1)
        assert "route from node a: tcp, rate not measured" in shown(cluster["b"])


@pytest.mark.skipif(bool(devices()), reason="needs a machine without RDMA")
def test_rdma_where_it_cannot_be_is_refused_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UCX_TLS, raising=False)
    command = [sys.executable, "-m", "awexd", "serve", "--socket", str(folder / "s"), "--state-dir", str(folder / "d")]
    command += ["--metaserver", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", *RDMA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "rdma: " in done.stderr
    assert "Traceback" not in done.stderr


@needs_openssl
def test_daemons_with_certificates_serve_each_other_and_nobody_else(folder: Path, forks: Forks) -> None:
    good, bad = made(folder, "good"), made(folder, "bad")

    def tls(files: dict[str, str], authority: str) -> tuple[str, ...]:
        named = {"cert": files["certificate"], "key": files["key"], "ca": authority}
        return tuple(word for name, file in named.items() for word in (f"--peer-tls-{name}", file))

    with Cluster(folder) as cluster:
        for name in "ab":
            cluster.add(name, *tls(good, good["authority"]))
        cluster.add("c", *tls(bad, good["authority"]))
        cluster.add("d", *tls(bad, bad["authority"]))
        cluster.add("e")
        trainer = Trainer(forks(2), cluster["a"])
        engines = {name: Engine(forks(1), cluster[name], f"e-{name}") for name in "bcde"}
        for step in (1, 2):
            trainer.publish(step)
            engines["b"].update(step)
        for name, why in {"c": "TLS failed", "d": "TLS failed", "e": "closed the connection|reset"}.items():
            engines[name].fails("reader.update(2, timeout=1)", "DeadlineExceeded", "step 2 of epoch 1")
            assert any(re.search(why, text) for text in texts(cluster[name], "failed"))
        for name in "cde":
            assert until(cluster[name], lambda status: job_of(status, "j"))
            assert job_of(cluster[name].ask("status"), "j")["held"] == []
        assert any("TLS failed" in text for text in texts(cluster["a"], "refused"))

        def fork() -> Process:
            return forks(1)[0]

        crew = Crew(cluster["a"], fork, 1, [1], sockets=[cluster["a"].socket, cluster["b"].socket])
        crew.hand_over(1)
        with pytest.raises(RemoteError, match=r"home of its exchanges: .*TLS failed") as caught:
            fork().do(
                crew.reader("e1", 0, 1, socket=cluster["c"].socket).replace("ring_bytes", "timeout=1, ring_bytes")
            )
        assert caught.value.kind == "DeadlineExceeded"


@needs_openssl
@pytest.mark.parametrize("given", [("ca",), ("cert", "key"), ("ca", "cert", "key")])
def test_tls_files_that_are_missing_or_unusable_are_refused_at_the_start(folder: Path, given: tuple[str, ...]) -> None:
    good = made(folder, "good")
    files = {"ca": good["authority"], "cert": good["certificate"], "key": good["key"]}
    if len(given) == 3:
        Path(good["key"]).write_text("no key")
    command = [sys.executable, "-m", "awexd", "serve", "--socket", str(folder / "s"), "--state-dir", str(folder / "d")]
    command += ["--metaserver", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"]
    command += [word for name in given for word in (f"--peer-tls-{name}", files[name])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "TLS" in done.stderr
    assert "Traceback" not in done.stderr
