"""``awexctl``: looks at what the daemon holds, drops or rolls back versions, and measures this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson

from awexd import __version__
from awexd_transports.errors import AwexdError, DeadlineExceeded

TIMEOUT_SECONDS = 30.0
FOLLOW_SECONDS = 3600.0
"""One request that waits for events; then another."""

Answer = dict[str, Any]
Show = Callable[[Answer], list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, or 1 on any failure."""
    arguments = _parser().parse_args(argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "bench":
        from awexd.bench.command import main as bench

        return bench(arguments)
    if arguments.command == "verify":
        from awexd.verifying import main as verify

        return verify(arguments)
    if arguments.command == "plan":
        from awexd.dryrun.command import main as plan

        return plan(arguments)
    if arguments.metaserver:
        from awexd import cluster

        return cluster.main(arguments)
    if arguments.command == "events":
        return _follow(arguments)
    operation, names, show = _COMMANDS[arguments.command]
    given = {name: getattr(arguments, name) for name in names}
    try:
        answer = _ask(arguments.socket, operation, given, arguments.timeout)
    except AwexdError as error:
        print(f"awexctl {arguments.command}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(show(answer)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="awexctl", description="Shows and changes what a node's awexd holds.")
    parser.add_argument("--version", action="version", version=f"awexctl {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--socket", help="the daemon's socket (default $AWEXD_SOCKET, else /run/awexd/awexd.sock)")
    common.add_argument("--json", action="store_true", help="one JSON object instead of text")
    common.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds (default %(default)g)")
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument("--metaserver", metavar="URL", help="of the whole cluster, from its MetaServer")
    cluster.add_argument("--token-file", metavar="FILE", help="with a token for the MetaServer")
    for name in ("ca", "cert", "key"):
        cluster.add_argument(f"--tls-{name}", metavar="FILE", help="for the MetaServer, as for `awexd serve`")
    parser.set_defaults(metaserver=None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("status", "jobs, versions held, engines and their state, memory"),
        ("versions", "every version, with its leases"),
        ("sessions", "connected processes"),
        ("drop", "withdraw a job's versions, or one of them"),
        ("rollback", "withdraw the versions after one, which is then the newest"),
        ("gc", "give back memory that nobody needs"),
    ):
        parents = [common, cluster] if name == "status" else [common]
        command = commands.add_parser(name, help=help_text, description=help_text, parents=parents)
        if name == "versions":
            command.add_argument("--job", help="only this job's (OWNER/NAME, or NAME for your own)")
        elif name in ("drop", "rollback"):
            command.add_argument("--job", required=True, help="OWNER/NAME, or NAME for your own")
            command.add_argument(
                "--step",
                type=int,
                required=name == "rollback",
                help="the step to go back to" if name == "rollback" else "only this step's version (default: all)",
            )
    help_text = "what happened to jobs, oldest first; the last few thousand things are remembered"
    events = commands.add_parser("events", help=help_text, description=help_text, parents=[common, cluster])
    events.add_argument("--job", help="only this job's (OWNER/NAME, or NAME for your own)")
    events.add_argument(
        "--follow", action="store_true", help="go on with what happens from now; --json: one object a line"
    )
    help_text = "compare a held version with a checkpoint on disk, tensor by tensor; exits with 1 where any differs"
    from awexd import verifying

    verifying.add_arguments(commands.add_parser("verify", help=help_text, description=help_text, parents=[common]))
    help_text = (
        "dry run without GPUs: does a trainer fit an engine, who sends whom how much; exits with 1 where it does not"
    )
    from awexd import dryrun

    dryrun.add_arguments(commands.add_parser("plan", help=help_text, description=help_text, parents=[common]))
    help_text = "measure this machine's limits and awexd against them; starts a daemon where none runs"
    from awexd.bench import add_arguments

    add_arguments(commands.add_parser("bench", help=help_text, description=help_text, parents=[common]))
    return parser


def _follow(arguments: argparse.Namespace) -> int:
    """Prints events; with ``--follow`` until it is interrupted or ended, or the daemon goes away."""
    from awexd_client.session import Connection, socket_path

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: list[Answer] = []
    try:
        connection = Connection(socket_path(arguments.socket))
        answer: Answer = {"last": None, "more": True}
        while answer["more"] or arguments.follow:
            given = {"job": arguments.job, "after": answer["last"]}
            timeout = arguments.timeout if answer["more"] else FOLLOW_SECONDS
            try:
                answer = connection.call("events", given, timeout=timeout)[0]
            except DeadlineExceeded:
                if answer["more"]:
                    raise
                continue
            found += answer["events"]
            if arguments.follow:
                print_events(found, arguments)
                found.clear()
        connection.goodbye()
        if not arguments.follow:
            print_events(found, arguments)
    except KeyboardInterrupt:
        return 0
    except AwexdError as error:
        print(f"awexctl events: {error}", file=sys.stderr)
        return 1
    return 0


def print_events(events: list[Answer], arguments: argparse.Namespace) -> None:
    if arguments.json and not arguments.follow:
        print(orjson.dumps({"events": events}, option=orjson.OPT_INDENT_2).decode())
        return
    for event in events:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
        line = orjson.dumps(event).decode() if arguments.json else f"{moment}  {event['job'] or '-'}  {event['text']}"
        print(line, flush=True)


def _ask(socket: str | None, operation: str, arguments: Answer, timeout: float) -> Answer:
    from awexd_client.session import Connection, socket_path

    connection = Connection(socket_path(socket))
    try:
        return connection.call(operation, arguments, timeout=timeout)[0]
    finally:
        connection.goodbye()


def _status(answer: Answer) -> list[str]:
    memory = answer["memory"]
    lines = [
        f"awexd {answer['version']}, process {answer['pid']}, {answer['socket']}, up {ago(answer['started'])}",
        f"memory: {_size(memory['used_bytes'])} in use, {_size(memory['available_bytes'])} available, "
        + ("locked" if memory["locked"] else f"not locked ({memory['lock_problem']})"),
        f"sessions: {answer['sessions']}",
    ]
    if told := answer["metaserver"]:
        state = "announced" if told["connected"] else f"not announced: {told['problem']}"
        where = told["address"] or "serves no others"
        lines.append(f"MetaServer {told['url']}, node {told['node']} ({where}): {state}")
        lines += [_route(route) for route in told["routes"]]
    lines += [line for gpu in answer["phases"] for line in _phase(gpu)]
    for job in answer["jobs"]:
        held, borrowed = (
            ", ".join(f"{epoch}.{step}" for epoch, step in job[kind]) or "none" for kind in ("held", "borrowed")
        )
        lines += [
            "",
            f"job {job['job']}: epoch {job['epoch']}, writers {len(job['writers'])} of {job['world_size']}, "
            f"{_size(job['bytes'])}",
            f"  held (epoch.step): {held}; borrowed: {borrowed}",
        ]
        lines += _elsewhere(job["elsewhere"])
        if choice := job["choice"]:
            how = "borrowed" if choice["borrowed"] else "through host memory"
            lines.append(f"  step {choice['step']} {how}: {choice['reason']}")
        lines += [
            f"  step {attempt['step']} is being written: ranks {attempt['ranks']}, sealed {attempt['sealed']}"
            for attempt in job["open"]
        ]
        lines += [
            f"  parked by rank {parcel['rank']}: {parcel['name']}, {_size(parcel['bytes'])}"
            + ("" if parcel["state"] == "pinned" else f" ({parcel['state']})")
            for parcel in job["parked"]
        ]
        lines += [
            f"  pinned: {pin['version'][0]}.{pin['version'][1]}, the offloaded weights of ranks {pin['ranks']}"
            for pin in job["pinned"]
        ]
        for engine in job["engines"]:
            lines.append(f"  {engine_line(engine, told['node'] if told else '')}")
            lines += [
                f"    update {one['update']} to {one['version'][0]}.{one['version'][1]} "
                + ("is under way" if one["settled"] else f"is had by {', '.join(one['have']) or 'nobody'} so far")
                for one in engine["rounds"]
            ]
            for worker in engine["workers"]:
                lines += [f"    rank {worker['rank']} {text}" for text in _told_of(worker)]
    return lines


def engine_line(engine: Answer, here: str = "") -> str:
    """An engine and the version that each of its workers has, by node where that is said; ``here``: where it is not."""
    by_node: dict[str, list[str]] = {}
    for worker in engine["workers"]:
        version = f" {worker['version'][0]}.{worker['version'][1]}" if worker["version"] else ""
        by_node.setdefault(worker.get("node", here), []).append(f"{worker['rank']} {worker['state']}{version}")
    several = len(by_node) > 1
    where = "".join(f" on {node}" for node in by_node if node != here and not several)
    workers = [(f"on {node}: " if several else "") + ", ".join(rows) for node, rows in sorted(by_node.items())]
    return f"engine {engine['engine']}{where} ({engine['world_size']} workers): {'; '.join(workers)}"


def by_engine(rows: Iterable[Answer]) -> Iterator[Answer]:
    """Engines of a job as its nodes tell of them: one whose workers are on several nodes once, with all of these."""
    spread: dict[str, Answer] = {}
    for row in rows:
        workers = [worker | {"node": row["node"]} for worker in row["workers"]]
        if len(workers) == row["world_size"]:
            yield row | {"workers": workers}
            continue
        known = spread.setdefault(
            row["engine"], {"engine": row["engine"], "world_size": row["world_size"], "workers": []}
        )
        known["workers"] += workers
    for found in spread.values():
        found["workers"].sort(key=lambda worker: worker["rank"])
        yield found


def _elsewhere(told: Answer | None) -> list[str]:
    """Of a job whose trainer is on another node."""
    if told is None:
        return []
    lines = [f"  trainer on {', '.join(told['trainer_on']) or 'no node'}; route {told['route']}"]
    if fetching := told["fetching"]:
        epoch, step = fetching["version"]
        come, rate = (_size(fetching[key]) for key in ("here_bytes", "bytes_per_second"))
        sources = ", ".join(fetching["sources"])
        lines.append(f"  fetching {epoch}.{step}: {come} of {_needed(fetching)}, {rate}/s, from {sources}")
    lines += [f"  of {part['version'][0]}.{part['version'][1]} here: {_needed(part)}" for part in told["parts"]]
    return [*lines, f"  waits for {told['waits_for']}"]


def _route(route: Answer) -> str:
    rate = "rate not measured" if route["bytes_per_second"] is None else f"{_size(route['bytes_per_second'])}/s"
    return f"route from node {route['node']}: {route['transport']}, {rate}, since {ago(route['since'])}: {route['why']}"


def _needed(told: Answer) -> str:
    """Bytes that are read on this node, of those of a version."""
    some, whole = told["bytes"], told["version_bytes"]
    return _size(some) if some == whole else f"{_size(some)} that are read here (of {_size(whole)})"


def _phase(gpu: Answer) -> list[str]:
    def named(claim: Answer) -> str:
        gone = "" if claim["connected"] else ", not connected again yet"
        return f"{claim['who']} of {claim['job']} (process {claim['pid']}{gone}) since {ago(claim['since'])}"

    held = "; ".join(map(named, gpu["holders"])) or "nobody"
    lines = [f"GPU {gpu['gpu']}: phase {gpu['phase'] or '-'}: {held}"]
    return lines + [f"  waits for phase {claim['phase']}: {named(claim)}" for claim in gpu["waiting"]]


def _told_of(worker: Answer) -> list[str]:
    """What else there is to say of a worker."""
    told = [f"failed: {worker['failure']['message']}"] if worker["failure"] else []
    if worker["staged"]:
        told.append(f"has staged {worker['staged'][0]}.{worker['staged'][1]}")
    if verified := worker["verified"]:
        count, whole = verified["differing"], verified["tensors"]
        told.append(f"{count or 'none'} of {whole} tensors differ from {verified['checkpoint']}")
    told += [f"loads {count} tensors itself (first {name}): {why}" for why, count, name in worker["aside"]]
    return told


def _versions(answer: Answer) -> list[str]:
    rows = [
        [row["job"], f"{row['epoch']}", f"{row['step']}", row["state"], _size(row["bytes"]), f"{row['leases']}"]
        for row in answer["versions"]
    ]
    return table(["JOB", "EPOCH", "STEP", "STATE", "SIZE", "LEASES"], rows)


def _sessions(answer: Answer) -> list[str]:
    rows = [
        [
            row["session"],
            f"{row['pid']}" + (f" on {row['node']}" if row["node"] else ""),
            f"{row['uid']}",
            f"forwarded to {row['home']}" if row["home"] else row["role"],
            row["job"] or "-",
            row.get("engine", "-"),
            f"{row.get('rank', '-')}",
            row.get("state", "-"),
        ]
        for row in answer["sessions"]
    ]
    return table(["SESSION", "PID", "UID", "ROLE", "JOB", "ENGINE", "RANK", "STATE"], rows)


def _withdrawn(answer: Answer) -> list[str]:
    def keys(found: list[list[int]]) -> str:
        return ", ".join(f"epoch {epoch} step {step}" for epoch, step in found) or "none"

    return [f"withdrawn: {keys(answer['withdrawn'])}", f"held: {keys(answer['held'])}"]


def _gc(answer: Answer) -> list[str]:
    return [f"freed {_size(answer['freed_bytes'])}"]


_COMMANDS: dict[str, tuple[str, tuple[str, ...], Show]] = {
    "status": ("status", (), _status),
    "versions": ("versions", ("job",), _versions),
    "sessions": ("sessions", (), _sessions),
    "drop": ("drop", ("job", "step"), _withdrawn),
    "rollback": ("rollback", ("job", "step"), _withdrawn),
    "gc": ("gc", (), _gc),
}
"""Command to operation, its arguments and how its answer is shown."""


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows])
    return [line.rstrip() for line in lines]


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def ago(moment: float) -> str:
    seconds = max(0, int(time.time() - moment))
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s"


if __name__ == "__main__":
    sys.exit(main())
