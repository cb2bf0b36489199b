"""What a daemon has in use, so that what is left behind shows."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from awexd_client.session import Connection

ASK_SECONDS = 20.0
SETTLE_SECONDS = 10.0
"""How long a dead client's things may take to go."""
PAUSE_SECONDS = 0.005

InUse = dict[str, int]


def in_use(socket: str) -> InUse:
    """Sessions (this question's among them), descriptors, bytes, leases, borrowed and unfinished versions."""
    connection = Connection(socket)
    try:
        status = connection.call("status", {}, timeout=ASK_SECONDS)[0]
        versions = connection.call("versions", {"job": None}, timeout=ASK_SECONDS)[0]["versions"]
        descriptors = len(os.listdir(f"/proc/{status['pid']}/fd"))
    finally:
        connection.goodbye()  # without a word, its session would be there for a moment longer
    return {
        "sessions": status["sessions"],
        "descriptors": descriptors,
        "bytes": status["memory"]["used_bytes"],
        "leases": sum(version["leases"] for version in versions),
        "borrowed": sum(len(job["borrowed"]) for job in status["jobs"]),
        "unfinished": sum(len(job["open"]) for job in status["jobs"]),
    }


def await_waiting(socket: str, job: str, workers: int, seconds: float = SETTLE_SECONDS) -> bool:
    """Returns when so many workers of that job wait for a version; whether they did in time."""
    connection = Connection(socket)
    end = time.monotonic() + seconds
    try:
        while True:
            jobs = connection.call("status", {}, timeout=ASK_SECONDS)[0]["jobs"]
            engines = [engine for found in jobs if found["job"].endswith(f"/{job}") for engine in found["engines"]]
            if sum(worker["waiting"] for engine in engines for worker in engine["workers"]) >= workers:
                return True
            if time.monotonic() > end:
                return False
            select.select([], [], [], PAUSE_SECONDS)
    finally:
        connection.goodbye()


def settled(socket: str, condition: Callable[[InUse], bool], seconds: float = SETTLE_SECONDS) -> InUse:
    """What is in use once ``condition`` of it holds, or when the time is over: nothing tells a bystander of it."""
    end = time.monotonic() + seconds
    while not condition(found := in_use(socket)) and time.monotonic() < end:
        select.select([], [], [], PAUSE_SECONDS)
    return found
