"""Every route of the document, asked over HTTP; ``Client`` checks each answer against it."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from awexd import tickets
from awexd.metaserver.manifests import Manifests
from awexd_transports.encoding import Header
from awexd_transports.errors import BudgetExceeded
from awexd_transports.layout import Entry, Manifest, body_digest
from awexd_transports.shard import Box, TensorSpec
from tests.metaserver.servers import DIGEST, RUN, Client, Failed, MetaServer, document, report

JOB = "alice/grpo"


def manifest(size: int = 8) -> Manifest:
    tensor = TensorSpec("layer.weight", (size,), "bfloat16")
    return Manifest.of([Entry(tensor, Box((0,), (size,)), 0)])


@pytest.fixture
def pair(client: Client) -> Client:
    """Two nodes, of which each has a rank of one job in epoch 1."""
    for node in ("n0", "n1"):
        client.announce(node, address=f"{node}.cluster:7470")
    assert client.join(JOB, "n0", [0], 2)["complete"] is False
    joined = client.join(JOB, "n1", [1], 2)
    assert (joined["epoch"], joined["complete"], joined["ranks"]) == (1, True, [[0, DIGEST], [1, DIGEST]])
    return client


def commit(client: Client, step: int, epoch: int = 1) -> int:
    attempt = client.begin(JOB, "n0", epoch, step, [0])
    assert client.begin(JOB, "n1", epoch, step, [1]) == attempt
    assert client.seal(JOB, "n0", epoch, step, attempt, [0]) is False
    assert client.seal(JOB, "n1", epoch, step, attempt, [1]) is True
    return attempt


def test_every_route_answers_as_the_document_says(pair: Client) -> None:
    attempt = commit(pair, 1)
    Client.called.clear()
    wanted = {found["operationId"] for methods in document()["paths"].values() for found in methods.values()}
    for operation in ("page", "healthz", "openapi", "metrics", "status", "nodes", "jobs"):
        pair.call(operation)
    assert json.loads(pair.call("openapi")) == document()
    pair.call("renew", {"run": RUN}, node="n0")
    body = manifest()
    assert pair.call("missing", {"digests": [body.digest]})["missing"] == [body.digest]
    pair.call("keep_manifest", body.encoded, digest=body.digest)
    assert pair.call("missing", {"digests": [body.digest]})["missing"] == []
    assert pair.call("manifest", digest=body.digest) == body.encoded
    engine = {"engine": "e", "world_size": 1, "workers": [worker()]}
    held = {"epoch": 1, "step": 1, "attempt": attempt, "pieces": [[0, DIGEST, 100, False]], "parts": None, "whole": []}
    told = report(engines=[engine], versions=[held])
    assert pair.call("report", told, node="n1", job=JOB) == {"refused": [], "home": None}
    seen = pair.call("job", job=JOB)
    assert seen["engines"] == [{"node": "n1", **engine}]
    assert seen["pieces"][0]["holders"] == {"n0": [0], "n1": [0]}
    assert pair.call("watch", job=JOB, query={"after": seen["brief"]["seq"], "timeout_ms": 0}) is None
    assert pair.call("watch", job=JOB, query={"after": 1})["engines"] == 1
    assert pair.call("watch_jobs", {"jobs": [[JOB, 0]], "timeout_ms": 0}) == {"jobs": [seen]}
    pair.call("events")
    where = {"node": "n1", "run": RUN, "epoch": 1, "step": 1}
    pair.call("ticket", where | {"source": None, "avoid": [], "ranks": [0], "parts": None}, job=JOB)
    agree_on(pair, attempt)
    pair.call("home", {"node": "n0", "run": RUN}, job=JOB)
    pair.join(JOB, "n1", [1], 2, epoch=1)
    second = pair.begin(JOB, "n1", 1, 2, [1])
    assert pair.begin(JOB, "n0", 1, 2, [0]) == second
    for node, rank in (("n0", 0), ("n1", 1)):
        told = {"node": node, "run": RUN, "epoch": 1, "step": 2, "attempt": second}
        pair.call("foretell", told | {"pieces": [[rank, DIGEST, 100 + rank, False]]}, job=JOB)
    assert [row["step"] for row in pair.call("job", job=JOB)["coming"]] == [2]
    pair.seal(JOB, "n1", 1, 2, second, [1])
    why = where | {"step": 2, "attempt": second, "reason": "out of memory"}
    assert pair.call("abort", why, job=JOB) == {"aborted": True}
    assert pair.call("rollback", {"step": 1}, job=JOB) == {"withdrawn": []}
    pair.call("part", {"node": "n1", "run": RUN, "ranks": [1]}, job=JOB)
    pair.call("forget", node="n1", job=JOB, query={"run": RUN})
    pair.call("leave", node="n1", query={"run": RUN})
    pair.call("close", job=JOB)
    pair.call("announce", {"run": RUN, "address": None, "version": "0"}, node="n1")
    stream(pair)
    assert wanted - Client.called == set()


def agree_on(client: Client, attempt: int) -> None:
    """Two nodes with a worker each of one engine, up to a round that both have."""
    at: dict[str, Any] = {"job": JOB, "engine": "two"}
    version = {"epoch": 1, "step": 1, "attempt": attempt}
    silent: dict[str, Any] = {"wishes": [], "rounds": [], "cannot": [], "held": [[1, 1, attempt]], "look": 0}
    turns = itertools.count()

    def told(node: str, rank: int, **more: Any) -> dict[str, Any]:
        row = {"rank": rank, "round": 3, "pid": 7, "state": "empty", "version": None, "digest": DIGEST, "staged": None}
        row |= {"result": None, "failure": None, "verified": None, "aside": []}
        return silent | {"node": node, "run": RUN, "turn": next(turns), "world_size": 2, "workers": [row], **more}

    wish = {"id": 1, "rank": 0, "number": 3, "any": False, **version}
    seen = client.call("tell", told("n0", 0, wishes=[wish]), **at)
    assert (seen["absent"], seen["rounds"]) == ([1], [])
    seen = client.call("tell", told("n1", 1), **at)
    (one,) = seen["rounds"]
    assert (one["number"], one["settled"], one["have"]) == (3, False, ["n0"])
    assert client.call("watch_engine", query={"after": seen["seq"], "timeout_ms": 0}, **at) is None
    known = {"id": one["id"], "number": 3, "settled": False, "have": True, **version}
    answer = client.call("tell", told("n1", 1, rounds=[known]), **at)
    assert [(one["settled"], one["have"]) for one in answer["rounds"]] == [(True, ["n0", "n1"])]
    assert client.call("watch_engine", query={"after": seen["seq"]}, **at) == {}
    assert client.call("look", {"node": "n0", "run": RUN}, **at) == {"look": 1}
    with pytest.raises(Failed, match="rank 0 of engine two is registered on node n0"):
        client.call("tell", told("n1", 0), **at)
    with pytest.raises(Failed, match="node n1 has told of engine two since"):
        client.call("tell", told("n1", 1, turn=0), **at)
    with pytest.raises(Failed, match="ranks below the world's size"):
        client.call("tell", told("n1", 2), **at)
    assert client.call("tell", told("n1", 1) | {"workers": []}, **at)["absent"] == [1]


def worker(version: list[int] | None = None) -> dict[str, Any]:
    return {"rank": 0, "state": "ready" if version else "empty", "version": version, "digest": DIGEST}


def stream(client: Client) -> list[dict[str, Any]]:
    """What a stream that begins at the first event says at once."""
    client.http.request("GET", "/v1/events/stream?after=0")
    response = client.http.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/event-stream"
    found: list[dict[str, Any]] = []
    while not found or not found[-1]["text"].startswith("closed"):
        line = response.readline()
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    Client.called.add("stream")
    response.close()
    return found


def test_watchers_are_told_of_a_commit_all_with_the_same_answer(pair: Client, metaserver: MetaServer) -> None:
    seq = pair.call("job", job=JOB)["brief"]["seq"]
    attempt = pair.begin(JOB, "n0", 1, 1, [0])
    pair.seal(JOB, "n0", 1, 1, attempt, [0])
    seq = pair.call("job", job=JOB)["brief"]["seq"]

    def wait(_: int) -> Any:
        with Client(metaserver) as own:
            return own.call("watch", job=JOB, query={"after": seq, "timeout_ms": 30_000})

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(wait, number) for number in range(8)]
        while b"watchers 8\n" not in pair.call("metrics"):
            pass
        pair.begin(JOB, "n1", 1, 1, [1])
        told = [future.result() for future in waiting]
    assert all(one == told[0] for one in told)
    assert told[0]["open"] == [[1, attempt, 1]]


def test_watch_with_a_seq_of_another_process_is_answered_at_once(pair: Client) -> None:
    for seq in (1, 1 << 53):
        assert pair.call("watch", job=JOB, query={"after": seq, "timeout_ms": 60_000})["epoch"] == 1


def test_watch_of_a_job_that_is_closed_says_so(pair: Client, metaserver: MetaServer) -> None:
    seq = pair.call("job", job=JOB)["brief"]["seq"]
    with ThreadPoolExecutor(1) as threads, Client(metaserver) as other:
        waiting = threads.submit(other.call, "watch", job=JOB, query={"after": seq, "timeout_ms": 30_000})
        while b"watchers 1\n" not in pair.call("metrics"):
            pass
        pair.call("close", job=JOB)
        assert waiting.result()["closed"] is True
    with pytest.raises(Failed) as failure:
        pair.call("watch", job=JOB)
    assert failure.value.code == "version_unavailable"


def test_one_request_waits_for_several_jobs_and_is_told_of_those_that_have_changed(
    pair: Client, metaserver: MetaServer
) -> None:
    for name in ("other", "quiet"):
        pair.join(f"alice/{name}", "n0", [0], 1)
    jobs = [JOB, "alice/other", "alice/quiet"]

    first = pair.call("watch_jobs", {"jobs": [[job, 0] for job in jobs], "timeout_ms": 0})["jobs"]
    seqs = [[view["brief"]["job"], view["brief"]["seq"]] for view in first]
    assert pair.call("watch_jobs", {"jobs": seqs, "timeout_ms": 1}) is None

    def wait(_: int) -> Any:
        with Client(metaserver) as own:
            return own.call("watch_jobs", {"jobs": seqs, "timeout_ms": 30_000})

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(wait, number) for number in range(8)]
        while b"watchers 24\n" not in pair.call("metrics"):
            pass
        pair.call("leave", node="n0", query={"run": RUN})  # a writer of all three
        told = [future.result() for future in waiting]
        assert b"watchers 0\n" in pair.call("metrics")
    assert all(one == told[0] for one in told)
    assert {view["brief"]["job"]: view["brief"]["absent"] for view in told[0]["jobs"]} == {job: [0] for job in jobs}
    assert all(view == pair.call("job", job=view["brief"]["job"]) for view in told[0]["jobs"])


def test_ranks_that_begin_and_seal_wake_nobody_who_waits_for_several_jobs(pair: Client, metaserver: MetaServer) -> None:
    def wait(seq: int) -> Future[Any]:
        waiting = threads.submit(other.call, "watch_jobs", {"jobs": [[JOB, seq]], "timeout_ms": 30_000})
        while b"watchers 1\n" not in pair.call("metrics"):
            pass
        return waiting

    with ThreadPoolExecutor(1) as threads, Client(metaserver) as other:
        waiting = wait(pair.call("job", job=JOB)["brief"]["seq"])
        pair.join(JOB, "n1", [1], 2, epoch=1, incarnation="i2")
        waiting = wait(waiting.result()["jobs"][0]["brief"]["seq"])
        attempt = pair.begin(JOB, "n0", 1, 1, [0])
        assert pair.begin(JOB, "n1", 1, 1, [1]) == attempt
        assert pair.seal(JOB, "n0", 1, 1, attempt, [0]) is False
        assert b"watchers 1\n" in pair.call("metrics")
        assert pair.seal(JOB, "n1", 1, 1, attempt, [1]) is True
        brief = waiting.result()["jobs"][0]["brief"]
    assert (brief["last_step"], brief["open"]) == (1, [])


def test_one_request_for_several_jobs_says_which_was_closed_and_which_is_not_there(
    pair: Client, metaserver: MetaServer
) -> None:
    pair.join("alice/other", "n0", [0], 1)
    seqs = [[job, pair.call("job", job=job)["brief"]["seq"]] for job in (JOB, "alice/other")]
    with ThreadPoolExecutor(1) as threads, Client(metaserver) as other:
        waiting = threads.submit(other.call, "watch_jobs", {"jobs": seqs, "timeout_ms": 30_000})
        while b"watchers 2\n" not in pair.call("metrics"):
            pass
        pair.call("close", job=JOB)
        (view,) = waiting.result()["jobs"]
    assert (view["brief"]["job"], view["brief"]["closed"], view["ranks"]) == (JOB, True, [])
    assert pair.call("watch_jobs", {"jobs": seqs, "timeout_ms": 0})["jobs"][0]["brief"]["closed"] is True
    with pytest.raises(Failed) as failure:
        pair.call("watch_jobs", {"jobs": [[JOB, 0], seqs[1]], "timeout_ms": 0})
    assert (failure.value.code, failure.value.error["details"]) == ("version_unavailable", {"absent": [JOB]})
    with pytest.raises(Failed, match="twice"):
        pair.call("watch_jobs", {"jobs": [seqs[1], seqs[1]], "timeout_ms": 0})


def test_events_come_in_pages_and_are_waited_for(pair: Client) -> None:
    first = pair.call("events", query={"limit": 1})
    assert (len(first["events"]), first["more"]) == (1, True)
    rest = pair.call("events", query={"after": first["last"]})
    assert [event["kind"] for event in first["events"] + rest["events"]] == ["joined"] * 2 + ["epoch"] + ["joined"] * 2
    assert pair.call("events", query={"after": rest["last"], "timeout_ms": 1}) is None


def test_tickets_name_the_nodes_that_have_the_ranks_and_only_those_can_check_them(pair: Client) -> None:
    commit(pair, 1)
    keys = {node: bytes.fromhex(pair.announce(node, address=f"{node}.cluster:7470")["key"]) for node in ("n0", "n1")}
    pair.announce("n2", run="another-run")
    where = {"node": "n2", "run": "another-run", "epoch": 1, "step": 1, "avoid": [], "ranks": None, "parts": None}
    given = pair.call("ticket", where | {"source": None}, job=JOB)["sources"]
    assert [(one["source"], one["ranks"]) for one in given] == [("n0", [0]), ("n1", [1])]
    for one in given:
        body = one["ticket"].encode()
        found = tickets.decode(body)
        assert (found.job, found.target, found.source) == (JOB, "n2", one["source"])
        assert tickets.key_of(keys[one["source"]], body).hex() == one["key"]
        other = keys["n0" if one["source"] == "n1" else "n1"]
        assert tickets.key_of(other, body).hex() != one["key"]
    for wrong in ({"source": "n2"}, {"source": "n9"}, {"source": None, "step": 2}):
        with pytest.raises(Failed) as failure:
            pair.call("ticket", where | wrong, job=JOB)
        assert failure.value.status == 404


def test_home_is_named_and_shown_and_told_by_its_node(pair: Client) -> None:
    key = bytes.fromhex(pair.announce("n0", address="n0.cluster:7470")["key"])
    own = pair.call("home", {"node": "n0", "run": RUN}, job=JOB)
    assert (own["node"], own["address"], own["key"], own["ticket"]) == ("n0", None, None, None)
    found = pair.call("home", {"node": "n1", "run": RUN}, job=JOB)
    assert (found["node"], found["address"]) == ("n0", "n0.cluster:7470")
    assert tickets.key_of(key, found["ticket"].encode()).hex() == found["key"]
    assert pair.call("job", job=JOB)["home"] == "n0"
    told = pair.call("report", report(home=True), node="n1", job="alice/other")
    assert told == {"refused": [], "home": "n1"}
    assert pair.call("report", report(home=True), node="n0", job="alice/other")["home"] == "n1"


REFUSED: dict[str, tuple[Callable[[Client], Any], int, str]] = {
    "a node that was not announced": (lambda c: c.begin(JOB, "n9", 1, 1, [0]), 404, "version_unavailable"),
    "a daemon that has ended": (lambda c: c.begin(JOB, "n0", 1, 1, [0], run="old-run-x"), 409, "version_conflict"),
    "another node's rank": (lambda c: c.begin(JOB, "n0", 1, 1, [1]), 409, "version_conflict"),
    "a stale epoch": (lambda c: c.begin(JOB, "n0", 2, 1, [0]), 409, "epoch_changed"),
    "no such job": (lambda c: c.begin("alice/none", "n0", 1, 1, [0]), 404, "version_unavailable"),
    "an attempt of nobody": (lambda c: c.seal(JOB, "n0", 1, 1, 1 << 53, [0]), 409, "version_conflict"),
    "a rank on another node": (lambda c: c.join(JOB, "n0", [1], 2), 409, "version_conflict"),
    "another world size": (lambda c: c.join(JOB, "n0", [0], 3), 409, "version_conflict"),
    "a rank beyond the world": (lambda c: c.join(JOB, "n0", [2], 2), 400, "invalid_argument"),
    "a rank twice": (lambda c: c.join(JOB, "n0", [0, 0], 2), 400, "invalid_argument"),
    "a version that is not there": (lambda c: c.call("rollback", {"step": 1}, job=JOB), 404, "version_unavailable"),
    "another address": (lambda c: c.announce("n0", "run-of-another", "h:1"), 409, "version_conflict"),
    "ranks of a job that spans nodes": (
        lambda c: c.call("report", report(ranks=[[0, DIGEST]]), node="n0", job=JOB), 400, "invalid_argument"
    ),
    "a path that climbs": (lambda c: c.call("renew", {"run": RUN}, node=".."), 400, "invalid_argument"),
    "a manifest of another digest": (
        lambda c: c.call("keep_manifest", manifest().encoded, digest=DIGEST), 400, "protocol_error"
    ),
    "no manifest": (lambda c: c.call("keep_manifest", b"\x80\x04\x95pickle", digest=DIGEST), 400, "protocol_error"),
    "a manifest that is not there": (lambda c: c.call("manifest", digest=DIGEST), 404, "version_unavailable"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_a_typed_error_and_nothing_done(pair: Client, metaserver: MetaServer, what: str) -> None:
    ask, status, code = REFUSED[what]
    with Client(metaserver) as other:
        before = other.call("job", job=JOB)
        with pytest.raises(Failed) as failure:
            ask(pair)
        assert (failure.value.status, failure.value.code) == (status, code)
        assert other.call("job", job=JOB) == before


def test_refusal_of_what_a_stopped_node_asks_says_to_announce(client: Client) -> None:
    with pytest.raises(Failed) as failure:
        client.call("renew", {"run": RUN}, node="n0")
    assert failure.value.error["details"] == {"announce": True}


def test_page_loads_nothing_from_elsewhere_and_may_not(client: Client) -> None:
    page = client.call("page").decode()
    assert not re.search(r"(?:https?:)?//[a-z0-9]|<(?:link|img|iframe)|src=|@import|url\(", page.replace("// ", ""))
    assert "innerHTML" not in page
    client.http.request("GET", "/")
    answer = client.http.getresponse()
    policy = answer.getheader("Content-Security-Policy") or ""
    answer.read()
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_metrics_are_prometheus_text(pair: Client) -> None:
    commit(pair, 4)
    text = pair.call("metrics").decode()
    assert text.endswith("\n")
    lines = text.splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r'awexd_metaserver_[a-z_]+(\{job="[^"]+"\})? -?\d+', line) for line in samples)
    names = {re.split("[{ ]", line)[0] for line in samples}
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == names
    assert f'awexd_metaserver_job_last_step{{job="{JOB}"}} 4' in samples


def test_manifest_that_unpacks_to_far_more_is_refused_and_one_that_may_is_kept(client: Client) -> None:
    bomb = Header(dims=1, fields=0, names=1, entries=1, vocabulary=2, payload=64 << 20).packed()
    bomb += zlib.compress(bytes(64 << 20), 9)
    assert len(bomb) < 1 << 17
    with pytest.raises(Failed) as failure:
        client.call("keep_manifest", bomb, digest=body_digest(bomb))
    assert (failure.value.status, failure.value.code) == (400, "protocol_error")
    names = [
        TensorSpec(f"layer.{number * 7919 % 100_003}.weight", (number + 1,), "bfloat16") for number in range(50_000)
    ]
    large = Manifest.of(Entry(one, Box((0,), one.shape), piece) for piece, one in enumerate(names))
    client.call("keep_manifest", large.encoded, digest=large.digest)
    assert client.call("manifest", digest=large.digest) == large.encoded
    client.call("keep_manifest", large.encoded, digest=large.digest)


def test_manifests_in_use_stay_and_others_make_room() -> None:
    bodies = {name: bytes(100) for name in "abcdef"}
    kept = Manifests(lambda: {"a"}, max_bytes=450, max_bodies=100)
    for name in "abcd":
        kept.add(name, bodies[name])
    kept.add("e", bodies["e"])
    assert "a" in kept
    assert "e" in kept
    assert kept.nbytes <= 450
    full = Manifests(lambda: set("abcd"), max_bytes=450, max_bodies=100)
    for name in "abcd":
        full.add(name, bodies[name])
    with pytest.raises(BudgetExceeded):
        full.add("e", bodies["e"])
    assert [name in full for name in "abcde"] == [True] * 4 + [False]
