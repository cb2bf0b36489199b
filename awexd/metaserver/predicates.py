"""JSON Schema, as much as ``openapi.json`` uses, as plain predicates: what almost every request only needs.

Where one says no, :mod:`awexd.metaserver.schema` says why. The two are tested against each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
Predicate = Callable[[Any], bool]


def predicate(root: Schema, schema: Schema) -> Predicate:
    """Whether a value is as the schema says."""
    schema = resolved(root, schema)
    if "anyOf" in schema:
        first, second = (predicate(root, one) for one in schema["anyOf"])
        return lambda value: first(value) or second(value)
    if "enum" in schema:
        known = {(type(value), value) for value in schema["enum"]}
        return lambda value: isinstance(value, str | int | None) and (type(value), value) in known
    return _KINDS[schema["type"]](root, schema)


def resolved(root: Schema, schema: Schema) -> Schema:
    """What a reference stands for."""
    while "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def _integer(root: Schema, schema: Schema) -> Predicate:
    low, high = schema["minimum"], schema["maximum"]
    return lambda value: type(value) is int and low <= value <= high


def _string(root: Schema, schema: Schema) -> Predicate:
    low, high = schema.get("minLength", 0), schema.get("maxLength", 1 << 30)
    if "pattern" not in schema:
        return lambda value: type(value) is str and low <= len(value) <= high
    matches = re.compile(schema["pattern"]).fullmatch
    return lambda value: type(value) is str and matches(value) is not None and low <= len(value) <= high


def _boolean(root: Schema, schema: Schema) -> Predicate:
    return lambda value: type(value) is bool


def _null(root: Schema, schema: Schema) -> Predicate:
    return lambda value: value is None


def _array(root: Schema, schema: Schema) -> Predicate:
    low, high = schema.get("minItems", 0), schema["maxItems"]
    if "prefixItems" in schema:
        checks = [predicate(root, one) for one in schema["prefixItems"]]
        if not low == high == len(checks):
            raise ValueError("a tuple has a fixed length")

        def fits(value: Any) -> bool:
            if type(value) is not list or len(value) != high:
                return False
            for one, item in zip(checks, value, strict=True):  # noqa: SIM110 - a generator costs as much again
                if not one(item):
                    return False
            return True

        return fits
    each = predicate(root, schema["items"])
    return lambda value: type(value) is list and low <= len(value) <= high and all(map(each, value))


def _object(root: Schema, schema: Schema) -> Predicate:
    checks = {name: predicate(root, one) for name, one in schema["properties"].items()}
    if schema["additionalProperties"] is not False or set(schema.get("required", ())) != checks.keys():
        raise ValueError("what a request holds is all required, and nothing else")
    pairs = list(checks.items())

    def check(value: Any) -> bool:
        if type(value) is not dict or len(value) != len(pairs):
            return False
        try:
            for name, one in pairs:
                if not one(value[name]):
                    return False
        except KeyError:
            return False
        return True

    return check


_KINDS: dict[str, Callable[[Schema, Schema], Predicate]] = {
    "integer": _integer,
    "string": _string,
    "boolean": _boolean,
    "null": _null,
    "array": _array,
    "object": _object,
}
