"""One document, read by us through msgspec and by a library for JSON Schema: both must say the same of a body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd.metaserver import bodies, schema
from awexd.metaserver.http import Refused
from awexd_transports.errors import InvalidArgument
from tests.metaserver.servers import document
from tests.metaserver.test_connections_functional import JUNK, sample

OPERATIONS = {one.name: one for one in schema.operations(schema.document()) if one.read is not None}
BODIES = {
    found["operationId"]: content["application/json"]["schema"]
    for methods in document()["paths"].values()
    for found in methods.values()
    if "application/json" in (content := found.get("requestBody", {}).get("content", {}))
}


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(OPERATIONS)), st.data())
def test_all_readings_of_a_body_agree(name: str, data: st.DataObject) -> None:
    operation, components = OPERATIONS[name], document()["components"]
    value = sample(components["schemas"], BODIES[name], data)
    if data.draw(st.booleans()):
        value = _spoilt(value, data)
    valid = jsonschema.Draft202012Validator(BODIES[name] | {"components": components}).is_valid(value)
    assert operation.read is not None
    text = orjson.dumps(value)
    if valid:
        assert orjson.loads(msgspec.json.encode(operation.read(text))) == value
        return
    with pytest.raises(InvalidArgument, match=r"^body: "):
        operation.read(text)


def _spoilt(value: Any, data: st.DataObject) -> Any:
    """The value, with something else at one place, any of them as likely."""
    places = list(_places(value, ()))
    return _replaced(value, data.draw(st.sampled_from(places)), data.draw(JUNK))


def _places(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield where
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _places(item, (*where, key))


def _replaced(value: Any, where: tuple[Any, ...], junk: Any) -> Any:
    if not where:
        return junk
    copy = value.copy()
    copy[where[0]] = _replaced(value[where[0]], where[1:], junk)
    return copy


def test_every_route_has_its_operation_and_limits() -> None:
    found = schema.operations(schema.document())
    router = schema.Router(found)
    for one in found:
        path = one.template.format(owner="a", name="b", node="n", engine="e", digest="0" * 64)
        assert router.find(one.method, path)[0].name == one.name
        assert 0 <= one.max_bytes <= 64 << 20
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/nodes/", 404), ("PATCH", "/v1/nodes", 405)):
        with pytest.raises(Refused) as failure:
            router.find(method, path)
        assert failure.value.status == status


@pytest.mark.parametrize("name", ["..", ".a", "a/b", "%2e", "a b", "a" * 101, "é", "a\n"])
def test_a_name_in_a_path_that_is_none_is_refused(name: str) -> None:
    router = schema.Router(schema.operations(schema.document()))
    with pytest.raises((InvalidArgument, Refused)):
        router.find("PUT", f"/v1/nodes/{name}")


NUMBER = {"type": "integer", "minimum": 1, "maximum": 9}
TEXT = {"type": "string", "pattern": "^a+$", "maxLength": 3}
PAIR = {"type": "array", "prefixItems": [NUMBER, TEXT], "items": False, "minItems": 2, "maxItems": 2}
OBJECT = {"type": "object", "properties": {"n": NUMBER}, "required": ["n"], "additionalProperties": False}
EDGES: list[tuple[dict[str, Any], list[Any]]] = [
    (NUMBER, [0, 1, 9, 10, True, 1.0, "1", None, [1]]),
    (TEXT, ["", "a", "aaa", "aaaa", "b", "a\n", "ab", 1, None]),
    (PAIR, [[1, "a"], [1], [1, "a", 1], [0, "a"], [1, "b"], [], {}, "1a"]),
    ({"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 2}, [[], [1], [1, 1], [1, 1, 1], [0], [1, 10], {}]),
    (OBJECT, [{"n": 1}, {"n": 0}, {}, {"m": 1}, {"n": 1, "m": 1}, [], None]),
    ({"anyOf": [NUMBER, {"type": "null"}]}, [1, 10, None, False, ""]),
    ({"type": "string", "enum": ["a", "b"]}, ["a", "b", "c", "", None, ["a"], {"a": 1}]),
    ({"type": "boolean"}, [True, False, 0, 1, None]),
]


@pytest.mark.parametrize(("found", "values"), EDGES)
def test_edges_of_each_keyword(found: dict[str, Any], values: list[Any]) -> None:
    valid = [not _is_float(value) and jsonschema.Draft202012Validator(found).is_valid(value) for value in values]
    if found is TEXT:
        valid[values.index("a\n")] = False  # Python's `$` looks past a line break; ours is the whole text
    kind = bodies.Types({}).of(found)
    assert [_passes(kind, value) for value in values] == valid
    assert {True, False} == set(valid)


@pytest.mark.parametrize("keyword", ["format", "exclusiveMinimum", "uniqueItems"])
@pytest.mark.parametrize("found", [NUMBER, TEXT, PAIR, OBJECT, *(kind for kind, _ in EDGES[5:])])
def test_a_keyword_that_nothing_would_check_is_refused(found: dict[str, Any], keyword: str) -> None:
    with pytest.raises(ValueError, match=keyword):
        bodies.Types({}).of(found | {keyword: 1})


@pytest.mark.parametrize("text", [b"", b"{", b"[1]x", b"\xff", b'"\xff"', b"[" * 5000])
def test_what_is_not_json_is_refused(text: bytes) -> None:
    for operation in OPERATIONS.values():
        assert operation.read is not None
        with pytest.raises(InvalidArgument, match="body"):
            operation.read(text)


def _is_float(value: Any) -> bool:
    """JSON Schema takes 1.0 for an integer; no writer of ours sends one."""
    return isinstance(value, float)


def _passes(kind: Any, value: Any) -> bool:
    try:
        bodies.reader(kind)(orjson.dumps(value))
    except InvalidArgument:
        return False
    return True
