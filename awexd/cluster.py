"""``awexctl status`` and ``events`` of a whole cluster, as its MetaServer tells them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from awexd.ctl import ago, by_engine, engine_line, print_events, table
from awexd.nodes.metaclient import MetaClient, tls_context, token_for
from awexd_transports.errors import AwexdError

WAIT_MS = 30_000
Answer = dict[str, Any]


def main(arguments: argparse.Namespace) -> int:
    """Shows it; returns the exit code. ``AWEXD_TOKEN_FILE`` stands in for ``--token-file``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(_show(arguments))
    except KeyboardInterrupt:
        return 0
    except AwexdError as error:
        print(f"awexctl {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


async def _show(arguments: argparse.Namespace) -> None:
    file = arguments.token_file or os.environ.get("AWEXD_TOKEN_FILE")
    token = token_for(Path(file) if file else None, "reader")
    context = tls_context(arguments.metaserver, arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    async with MetaClient(arguments.metaserver, token, context) as client:
        if arguments.command == "events":
            await _events(client, arguments)
            return
        answer = await client.call("GET", "/v1/status", timeout=arguments.timeout)
        jobs = [await _job(client, job["job"], arguments.timeout) for job in answer["jobs"]]
    shown = answer | {"jobs": [job for job in jobs if job is not None]}
    if arguments.json:
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(_status(shown, client.url)))


async def _job(client: MetaClient, name: str, timeout: float) -> Answer | None:  # noqa: ASYNC109
    """None: it was closed meanwhile."""
    with contextlib.suppress(LookupError):
        found: Answer = await client.call("GET", f"/v1/jobs/{name}", timeout=timeout)
        return found
    return None


async def _events(client: MetaClient, arguments: argparse.Namespace) -> None:
    after, found, first = 0, list[Answer](), True
    while first or arguments.follow:
        query = {"after": after, "timeout_ms": 0 if first else WAIT_MS}
        patience = arguments.timeout if first else WAIT_MS / 1000 + arguments.timeout
        answer = await client.call("GET", "/v1/events", query=query, timeout=patience)
        if answer is not None:
            after, first = answer["last"], answer["more"]
            found += [_shown(event) for event in answer["events"] if arguments.job in (None, event["job"])]
        if arguments.follow:
            print_events(found, arguments)
            found.clear()
    if not arguments.follow:
        print_events(found, arguments)


def _shown(event: Answer) -> Answer:
    """As a daemon's own events are."""
    event["number"] = event.pop("seq")
    return event


def _status(answer: Answer, url: str) -> list[str]:
    lines = [
        f"MetaServer {url}, awexd {answer['version']}, up {ago(time.time() - answer['up_ms'] / 1000)}",
        "",
        *table(
            ["NODE", "ADDRESS", "VERSION", "JOBS", "SEEN"],
            [
                [n["node"], n["address"] or "-", n["version"], f"{len(n['jobs'])}", f"{n['seen_ms'] / 1000:.1f} s ago"]
                for n in answer["nodes"]
            ],
        ),
    ]
    for job in answer["jobs"]:
        lines += ["", *_job_lines(job)]
    return lines


def _job_lines(job: Answer) -> list[str]:
    brief = job["brief"]
    there = brief["world_size"] - len(brief["absent"])
    lines = [f"job {brief['job']}: epoch {brief['epoch']}, writers {there} of {brief['world_size']}"]
    if job["home"]:
        lines.append(f"  exchanged by way of node {job['home']}")
    for version in job["pieces"]:
        count = version["world_size"]
        held = ", ".join(
            (node if len(ranks) == count else f"{node} ({len(ranks)} of {count} ranks)")
            + (" in part" if node in version["parts"] else "")
            for node, ranks in version["holders"].items()
        )
        lines.append(f"  version {version['epoch']}.{version['step']} held by: {held or 'nobody'}")
    lines += [
        f"  step {step} is being written: {sealed} of {brief['world_size']} sealed" for step, _, sealed in brief["open"]
    ]
    return lines + [f"  {engine_line(engine)}" for engine in by_engine(job["engines"])]
