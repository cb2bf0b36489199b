"""Two readings of one document: the quick one and the one that says why, and a library's as the third."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd.metaserver import schema
from awexd.metaserver.http import Refused
from awexd_transports.errors import InvalidArgument
from tests.metaserver.servers import document
from tests.metaserver.test_connections_functional import JUNK, sample

OPERATIONS = {one.name: one for one in schema.operations(schema.document()) if one.body is not None}
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
    assert operation.accepts is not None
    assert operation.accepts(value) is valid
    if valid:
        operation.check(value)
        return
    with pytest.raises(InvalidArgument) as failure:
        operation.check(value)
    assert "not as /openapi.json" not in str(failure.value)  # it says what is wrong


def _spoilt(value: Any, data: st.DataObject) -> Any:
    """The value, with something else at one place."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        name = data.draw(st.sampled_from(sorted(value)))
        return value | {name: _spoilt(value[name], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _spoilt(value[at], data), *value[at + 1 :]]
    return data.draw(JUNK.filter(lambda junk: not isinstance(junk, float)))


def test_every_route_has_its_operation_and_limits() -> None:
    found = schema.operations(schema.document())
    router = schema.Router(found)
    for one in found:
        path = one.template.format(owner="a", name="b", node="n", digest="0" * 64)
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
