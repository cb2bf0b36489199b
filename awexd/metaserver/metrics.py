"""Prometheus' text format."""

from __future__ import annotations

from awexd.metaserver.http import Server
from awexd.metaserver.manifests import Manifests
from awexd.metaserver.publishing import Publisher
from awexd.metaserver.state import State


def text(state: State, manifests: Manifests, publisher: Publisher, server: Server) -> str:
    """Counters and gauges; of jobs, the epoch and the last step each."""
    watchers = sum(map(len, publisher.watchers.values())) + len(publisher.watches)
    rows: list[tuple[str, str, str, list[tuple[str, int]]]] = [
        ("requests_total", "counter", "Requests answered or being answered", [("", server.requests)]),
        ("disk_writes_total", "counter", "Transactions on disk", [("", publisher.flushes)]),
        ("connections", "gauge", "Open connections", [("", len(server.connections))]),
        ("watchers", "gauge", "Waits for a job's change", [("", watchers)]),
        ("streams", "gauge", "Streams of events", [("", len(publisher.events.streams))]),
        ("nodes", "gauge", "Daemons that are there", [("", len(state.nodes))]),
        ("manifests", "gauge", "Manifests kept", [("", len(manifests))]),
        ("manifest_bytes", "gauge", "Bytes of manifests kept", [("", manifests.nbytes)]),
        ("job_epoch", "gauge", "Epoch", [(name, job.epoch) for name, job in sorted(state.jobs.items())]),
        ("job_last_step", "gauge", "Last step committed", [(n, job.high) for n, job in sorted(state.jobs.items())]),
    ]
    lines = []
    for name, kind, meaning, values in rows:
        lines += [f"# HELP awexd_metaserver_{name} {meaning}.", f"# TYPE awexd_metaserver_{name} {kind}"]
        for job, value in values:
            label = f'{{job="{job}"}}' if job else ""  # a job's name needs no escape
            lines.append(f"awexd_metaserver_{name}{label} {value}")
    return "\n".join(lines) + "\n"
