"""``awexctl plan`` as a command, and with a real daemon and real processes that have registered."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from awexd_client import WeightWriter, WorkerWeightsReader
from tests.awexd.dryrun_models import tiny
from tests.daemons import Daemon


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "awexd.ctl", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(tiny("qwen3_moe")))
    return str(tmp_path)


def test_dry_run_shows_a_table_an_object_and_a_picture(model: str, tmp_path: Path) -> None:
    arguments = ("--model", model, "--train", "megatron:tp=2,dp=2,ep=2,etp=1", "--infer", "vllm:tp=2,engines=2")
    shown = run(*arguments)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "megatron:tp=2,dp=2,ep=2,etp=1 (4 ranks) to vllm:tp=2,engines=2 (2 engines of 2 workers)" in shown.stdout
    svg = tmp_path / "plan.svg"
    told = run(*arguments, "--json", "--svg", str(svg), "--rate", "50")
    answer = json.loads(told.stdout)
    assert (told.returncode, answer["works"], answer["model"]["family"]) == (0, True, "qwen3_moe")
    paths = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}path")
    assert sorted(int(path.attrib["data-bytes"]) for path in paths) == sorted(one["bytes"] for one in answer["links"])
    assert sum(one["bytes"] for one in answer["links"]) == answer["totals"]["bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train", "megatron:tp=3", "--infer", "hf"], "4 query heads do not divide by tp=3"),
        (["--train", "hf"], "--infer: needed with --model"),
        (["--train", "hf", "--infer", "hf", "--rate", "-1"], "more than 0"),
        (["--train", "hf", "--infer", "hf", "--dtype", "int9"], "int9"),
        (["--train", "hf", "--infer", "hf", "--svg", "/nowhere/there.svg"], "cannot be written"),
    ],
)
def test_what_cannot_be_planned_is_said_and_exits_with_1(model: str, arguments: list[str], said: str) -> None:
    done = run("--model", model, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("awexctl plan: ")
    assert said in done.stderr


def test_configuration_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text("{")
    for name, said in (("none", "cannot be read"), ("half.json", "cannot be read"), ("list.json", "no configuration")):
        done = run("--model", str(tmp_path / name), "--train", "hf", "--infer", "hf")
        assert done.returncode == 1
        assert said in done.stderr


def test_plan_loads_no_torch(model: str) -> None:
    arguments = ["plan", "--model", model, "--train", "fsdp:shards=2", "--infer", "sglang:tp=2", "--json"]
    script = f"import sys; from awexd.ctl import main; main({arguments!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "matplotlib", "aiohttp", "uvloop"}


# A job's own

WORKER = """
import sys, torch
from awexd_client import Shard, WeightWriter, WorkerWeightsReader
kind, socket, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
if kind == "writer":
    one = WeightWriter("j", rank, 2, socket)
    part, total = torch.zeros(6 - 2 * rank), 6 * rank
    shards = [Shard("a", part, (10,), (total,)), Shard("b", torch.zeros(4))]
else:
    one = WorkerWeightsReader("j", sys.argv[4], rank, 2, socket)
    shards = [Shard("a", torch.zeros(5), (10,), (5 * rank,)), Shard("b", torch.zeros(4))]
    if sys.argv[4] == "odd":
        shards.append(Shard("c", torch.zeros(1)))
with one:
    one.register(shards)
    print("registered", flush=True)
    sys.stdin.readline()
"""


class Worker:
    """A process that has registered, and stays until it is left."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-c", WORKER, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> None:
        assert self._process.stdout
        assert self._process.stdout.readline() == "registered\n"

    def __exit__(self, *error: object) -> None:
        self._process.communicate("\n", timeout=30)


@pytest.fixture
def workers(daemon: Daemon) -> Iterator[None]:
    """Both ranks of a trainer, and both workers of engine e."""
    started = [Worker("writer", daemon.socket, rank) for rank in range(2)]
    started += [Worker("reader", daemon.socket, rank, "e") for rank in range(2)]
    for one in started:
        one.__enter__()
    yield
    for one in started:
        one.__exit__()


def plan(daemon: Daemon, job: str = "j") -> tuple[int, Any]:
    done = run("--job", job, "--socket", daemon.socket, "--json")
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_job_is_planned_from_what_has_registered(daemon: Daemon) -> None:
    code, told = plan(daemon)
    assert (code, told["works"], told["train"]["ranks"]) == (0, True, 2)
    links = {(one["source"], one["engine"], one["rank"]): one["bytes"] for one in told["links"]}
    # Float32: of b rank 0 writes one element and rank 1 three.
    assert links == {(0, "e", 0): 24, (1, "e", 0): 12, (0, "e", 1): 8, (1, "e", 1): 28}
    assert [one["writes"] for one in told["trainer"]] == [28, 28]
    given = run("--job", "j", "--train", "hf", "--socket", daemon.socket)
    assert (given.returncode, given.stderr) == (
        1,
        "awexctl plan: --train: --job plans what has registered; leave it out\n",
    )
    with Worker("reader", daemon.socket, 0, "odd"):
        code, said = plan(daemon)
        assert (code, said) == (1, "awexctl plan: engine odd: rank 1 of 2 has not registered\n")
        with Worker("reader", daemon.socket, 1, "odd"):
            code, told = plan(daemon)
            assert (code, told["works"], told["missing"]) == (1, False, ["c"])


def test_job_without_a_trainer_is_planned_from_the_version_that_is_held(daemon: Daemon) -> None:
    assert plan(daemon) == (1, "awexctl plan: no job root/j here\n")
    with WorkerWeightsReader("j", "e", 0, 1, daemon.socket) as reader:
        reader.register({"a": torch.zeros(1000)})
        assert plan(daemon) == (1, "awexctl plan: root/j: no trainer has registered, and no version is held\n")
        with WeightWriter("j", 0, 1, daemon.socket) as writer:
            writer.register({"a": torch.ones(1000)})
            writer.publish(1).committed()
            assert plan(daemon)[1]["notes"] == []
        code, told = plan(daemon)
        assert (code, told["totals"]) == (0, {"copies": 1, "bytes": 4000, "links": 1})
        assert "newest version" in told["notes"][0]
    assert plan(daemon) == (1, "awexctl plan: root/j: no engine has registered\n")
