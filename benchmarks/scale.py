"""Updates of trillion-parameter jobs, simulated: real manifests, the real planner, every hop of every piece.

``1t-two-node-engines``: 256 trainer ranks to eight FP8 engines of 16 GPUs. ``1t-ep128``: the same to one engine of 128
GPUs. ``1t-1024``: 1,024 ranks to 64 engines of 16 GPUs. Value: seconds from ``publish`` to the last engine done; limit:
the slowest hop alone, each byte passing it once. Workers stand still in ``update(overlap=True)``; ``-staged``: they
generate until all is on their nodes, for a short pause. ``1t-plan`` and ``1t-metadata`` are measured: seconds, and
encoded manifests, of one rank. With ``--write`` the figures go to ``benchmarks/results/scale.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from awexd.bench.figures import Bar, Figure, table, write
from awexd.peers.settings import PeerSettings
from awexd_transports.layout import Manifest
from awexd_transports.share import share
from benchmarks.simulation import planning
from benchmarks.simulation.daemon import piece_seconds
from benchmarks.simulation.hardware import GPUS, Hardware, measured
from benchmarks.simulation.hops import bounds
from benchmarks.simulation.models import KIMI_K2, LING_1T, Layout, fp8_model
from benchmarks.simulation.needs import Needs, needs_of
from benchmarks.simulation.update import Options, Outcome, simulate

RESULTS = ROOT / "benchmarks" / "results" / "scale.json"
ROUNDS = 3
OVERLAPPED, STAGED = Options(early=True, overlap=True), Options(early=True)
SHORT_PAUSE = "engines generate until all is on their nodes: longest_pause is how long they stand still"
ASSUMED = (
    "trainer ranks hold bf16 and write FP8 with block scales, cast before they are copied to host memory; RDMA at the"
    " NICs' rate, verify='off'; published by others, on other machines: Awex 6 s by RDMA and 20 s by NCCL, pplx 1.3 s"
    " with GPU memory as source, checkpoint-engine 16 s"
)


@dataclass(frozen=True)
class Case:
    """Megatron ranks in stages of TP8 and EP32, SGLang's workers with attention whole on each and experts dealt out.

    Attributes:
        peer: whose published figure is of a job like that.
    """

    replicas: int
    gpus: int
    engines: int
    peer: dict[str, Any]

    def layout(self, model: Mapping[str, Any]) -> Layout:
        uneven = ",last=5" if model is KIMI_K2 else ""  # 61 layers in eight stages
        gpus = f"tp={self.gpus},ep={self.gpus},dp_attention={self.gpus}"
        return Layout(
            f"megatron:tp=8,pp=8,cp=4,dp={self.replicas},ep=32,etp=1{uneven}",
            f"sglang:{gpus},dp_lm_head=1,moe_dense_tp=1,shared=whole,engines={self.engines}",
        )


CASES = {
    "1t-two-node-engines": Case(1, 16, 8, {"name": "checkpoint-engine", "value": 16.0, "quoted": True}),
    "1t-ep128": Case(1, 128, 1, {"name": "pplx", "value": 1.3, "quoted": True}),
    "1t-1024": Case(4, 16, 64, {"name": "Awex, RDMA", "value": 6.0, "quoted": True}),
}
MODELS = {"kimi": KIMI_K2, "ling": LING_1T}
NAMES = [*(f"{case}{kind}" for case in CASES for kind in ("", "-staged")), "1t-plan", "1t-metadata"]
BAR = Bar("ratio", "<=", 1.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of what is measured (default %(default)s)")
    parser.add_argument("--case", choices=[*CASES], action="append", help="only these")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(planning.child(arguments.child[0], Path(arguments.child[1])))
        return
    if arguments.write and arguments.case:
        parser.error("--write keeps all cases together: leave out --case")
    cases = {name: CASES[name] for name in arguments.case or CASES}
    figures = []
    for figure in measure(cases, arguments.rounds):
        print(table([figure])[1], flush=True)
        figures.append(figure)
    if arguments.write:
        write(RESULTS, figures, f"python benchmarks/scale.py --rounds {arguments.rounds}")


@dataclass(frozen=True)
class Made:
    """A case with its model's manifests.

    Attributes:
        nodes: what each node of one engine needs.
    """

    case: Case
    layout: Layout
    model_bytes: int
    trainer: Sequence[Manifest]
    segments: Sequence[Manifest]
    workers: Sequence[Manifest]
    nodes: Sequence[Needs]

    @property
    def published(self) -> list[int]:
        return [segment.segment_nbytes for segment in self.segments]


def make(case: Case, values: Mapping[str, Any]) -> Made:
    model, layout = fp8_model(values), case.layout(values)
    trainer, workers = layout.trainer(model), layout.engine(model)
    segments = list(share(trainer))
    piece_bytes = PeerSettings().piece_bytes
    nodes = [needs_of(segments, workers[at : at + GPUS], piece_bytes) for at in range(0, len(workers), GPUS)]
    return Made(case, layout, model.nbytes, trainer, segments, workers, nodes)


def measure(cases: Mapping[str, Case], rounds: int) -> Iterator[Figure]:
    hardware = measured(min(piece_seconds() for _ in range(rounds)))
    planned: dict[str, list[planning.Planned]] = {}
    bodies: dict[str, planning.Bodies] = {}
    for name, case in cases.items():
        made = {model: make(case, values) for model, values in MODELS.items()}
        yield _simulated(name, made, hardware)
        yield _staged(name, made["kimi"], hardware)
        for model, one in made.items():
            planned[f"{name}_{model}"] = [_planned(one) for _ in range(rounds)]
            bodies[f"{name}_{model}"] = planning.bodies_of(one.trainer, one.segments, one.workers)
    yield _plan_figure(planned)
    yield _metadata_figure(bodies)


def _simulated(name: str, made: Mapping[str, Made], hardware: Hardware) -> Figure:
    """Of Kimi-K2; Ling-1T's numbers are among the further ones."""
    seconds, limit, more = _outcome(made["kimi"], hardware, OVERLAPPED)
    figure = Figure(name, seconds, "s", limit, seconds / limit, BAR, peer=made["kimi"].case.peer, note=ASSUMED)
    ling, ling_limit, ling_more = _outcome(made["ling"], hardware, OVERLAPPED)
    figure.more.update(more, ling_seconds=ling, ling_limit=ling_limit, ling_ratio=ling / ling_limit, ling=ling_more)
    figure.more["rates"] = _told(hardware)
    return figure


def _staged(name: str, made: Made, hardware: Hardware) -> Figure:
    seconds, limit, more = _outcome(made, hardware, STAGED)
    return Figure(f"{name}-staged", seconds, "s", limit, seconds / limit, note=SHORT_PAUSE, more=more)


def _outcome(made: Made, hardware: Hardware, options: Options) -> tuple[float, float, dict[str, Any]]:
    hops = bounds(hardware, made.published, made.nodes)
    slowest = max(hops, key=lambda hop: hops[hop])
    outcome = simulate(hardware, made.published, made.nodes, made.case.engines, options)
    more = {
        "train": made.layout.train,
        "infer": made.layout.infer,
        "bytes": made.model_bytes,
        "slowest_hop": slowest,
        "hop_seconds": {hop: round(seconds, 4) for hop, seconds in hops.items()},
        **_phases(outcome),
        **_traffic(made, outcome),
        "metaserver_requests": outcome.requests,
        "metaserver_requests_per_second": round(outcome.requests / outcome.seconds, 1),
        "metadata_bytes": max(planning.bodies_of(made.trainer, made.segments, made.workers)),
    }
    return outcome.seconds, hops[slowest], more


def _phases(outcome: Outcome) -> dict[str, float]:
    found = {
        "committed": outcome.committed,
        "first_node_has_all": min(outcome.fetched),
        "last_node_has_all": max(outcome.fetched),
        "first_engine_done": min(outcome.done),
        "longest_pause": max(outcome.pauses),
    }
    return {name: round(seconds, 4) for name, seconds in found.items()}


def _traffic(made: Made, outcome: Outcome) -> dict[str, Any]:
    """Gigabytes of the busiest node's links, and that over the mean."""
    found: dict[str, Any] = {
        "trainer_egress": round(sum(outcome.sent) / made.model_bytes, 3),
        "network_over_needs": round(sum(outcome.received) / made.case.engines / sum(n.total for n in made.nodes), 4),
    }
    links = {
        "trainer_nic": outcome.sent,
        "engine_nic_in": outcome.received,
        "engine_nic_out": outcome.relayed,
        "engine_memory": outcome.memory,
        "d2h": [float(nbytes) for nbytes in made.published],
        "h2d": [nbytes for node in made.nodes for nbytes in node.of_workers.tolist()],
    }
    for link, carried in links.items():
        found[f"{link}_gigabytes"] = round(max(carried) / 1e9, 2)
        found[f"{link}_balance"] = round(max(carried) / statistics.fmean(carried), 3) if max(carried) else None
    return found


def _told(hardware: Hardware) -> dict[str, Any]:
    return {
        "nic_gigabytes": hardware.nic / 1e9,
        "memory_gigabytes": hardware.memory / 1e9,
        "d2h_gigabytes": hardware.down / 1e9,
        "h2d_gigabytes": hardware.up / 1e9,
        "control_ms": hardware.control * 1e3,
        "network_ms": hardware.network * 1e3,
        "metaserver_ms_a_request": hardware.request * 1e3,
        "metaserver_ms_late": hardware.lateness * 1e3,
        "daemon_ms_a_piece": round(hardware.piece * 1e3, 4),
        "launch_ms": round(hardware.launch * 1e3, 4),
        "from": list(hardware.sources),
    }


def _planned(made: Made) -> planning.Planned:
    with tempfile.TemporaryDirectory(prefix="awexd-b") as name:
        command = [__file__, "--child"]
        return planning.measure(Path(name), command, made.trainer, made.segments, made.workers[:GPUS])


def _plan_figure(planned: Mapping[str, Sequence[planning.Planned]]) -> Figure:
    """The slower of a writer's and a reader's part, of any job; a node's part is its daemon's, not a rank's."""
    medians = {
        job: {part: statistics.median(getattr(one, part) for one in found) for part in planning.Planned._fields}
        for job, found in planned.items()
    }
    worst = max(max(each["writer"], each["reader"]) for each in medians.values())
    figure = Figure("1t-plan", worst, "s", bar=Bar("value", "<=", 1.0), rounds=len(next(iter(planned.values()))))
    figure.more["note"] = "decoding included, in a fresh process; node: what a daemon brings for eight workers"
    figure.more.update(
        {f"{job}_{part}".replace("-", "_"): seconds for job, each in medians.items() for part, seconds in each.items()}
    )
    return figure


def _metadata_figure(bodies: Mapping[str, planning.Bodies]) -> Figure:
    worst = max(max(each) for each in bodies.values()) / 1e6
    figure = Figure("1t-metadata", worst, "MB", bar=Bar("value", "<=", 5.0))
    figure.more["note"] = "encoded manifests that a rank must have, once a job"
    figure.more.update(
        {f"{job}_{part}".replace("-", "_"): n for job, each in bodies.items() for part, n in each._asdict().items()}
    )
    return figure


if __name__ == "__main__":
    main()
