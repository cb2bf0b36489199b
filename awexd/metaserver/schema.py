"""``openapi.json`` is the one definition of routes, roles, limits and what requests hold: this turns it into checks.

As much of JSON Schema as that document uses; a keyword that is not known here is an error at the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson

from awexd.metaserver.http import Refused
from awexd.metaserver.predicates import Predicate, Schema, predicate, resolved
from awexd_transports.errors import InvalidArgument

Check = Callable[[Any, str], None]
"""Raises InvalidArgument, naming the place, where a value is not of that kind."""

DEFAULT_BODY_BYTES = 64 << 10
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: type(value) is dict,
    "array": lambda value: type(value) is list,
    "string": lambda value: type(value) is str,
    "integer": lambda value: type(value) is int,
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
}
_PLACE = re.compile(r"\{([a-z_]+)\}")
_IGNORED = {"description", "default", "examples"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route.

    Attributes:
        role: the least that may call it; None: anyone.
        numbers, texts: query parameters by name: their checks; ``required`` of them must be given.
        accepts, body: of the JSON body, the second to say what is wrong; None where it has none, or is bytes.
    """

    name: str
    method: str
    template: str
    role: str | None
    max_bytes: int
    places: Mapping[str, Check]
    numbers: Mapping[str, Check]
    texts: Mapping[str, Check]
    required: frozenset[str]
    accepts: Predicate | None
    body: Check | None
    binary: bool

    def check(self, value: Any) -> None:
        """Refuses a body that is not as the document says, and says why."""
        if self.accepts is not None and self.body is not None and not self.accepts(value):
            self.body(value, "body")
            raise InvalidArgument("body: not as /openapi.json says")

    def query(self, text: str) -> dict[str, Any]:
        """The parameters of a query, checked. Nothing in it is decoded: no value of ours needs it."""
        found: dict[str, Any] = {}
        for pair in text.split("&") if text else ():
            name, _, value = pair.partition("=")
            if name in found or not (name in self.numbers or name in self.texts):
                raise InvalidArgument(f"query: unknown or repeated parameter {name[:64]!r}")
            if name in self.numbers:
                if not (value.isascii() and value.isdecimal() and len(value) <= 16):
                    raise InvalidArgument(f"query: {name} is a number")
                found[name] = int(value)
                self.numbers[name](found[name], name)
            else:
                found[name] = value
                self.texts[name](value, name)
        if self.required - found.keys():
            raise InvalidArgument(f"query: missing {', '.join(sorted(self.required - found.keys()))}")
        return found


def document() -> bytes:
    """The document itself."""
    return resources.files("awexd.metaserver").joinpath("openapi.json").read_bytes()


def operations(body: bytes) -> list[Operation]:
    """What the document describes."""
    root = orjson.loads(body)
    return [
        _operation(root, template, method, found)
        for template, methods in root["paths"].items()
        for method, found in methods.items()
    ]


class Router:
    """Finds the operation of a method and a path."""

    def __init__(self, found: list[Operation]) -> None:
        self._fixed: dict[str, dict[str, Operation]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Operation]]] = []
        for template in dict.fromkeys(operation.template for operation in found):
            methods = {one.method: one for one in found if one.template == template}
            if "{" in template:
                pattern = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
                self._patterns.append((re.compile(_PLACE.sub(r"(?P<\1>[^/]+)", pattern)), methods))
            else:
                self._fixed[template] = methods

    def find(self, method: str, path: str) -> tuple[Operation, dict[str, str]]:
        """The operation and what stands in its path's places.

        Raises:
            Refused: no such route, or not by that method.
            InvalidArgument: a name in the path that is none.
        """
        methods, places = self._fixed.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns:
                match = pattern.fullmatch(path)
                if match is not None:
                    methods, places = candidates, match.groupdict()
                    break
        if methods is None:
            raise Refused(404, "no such route; /openapi.json lists them", "invalid_argument")
        operation = methods.get(method)
        if operation is None:
            raise Refused(405, f"by {', '.join(sorted(methods))} only", "invalid_argument")
        for name, check in operation.places.items():
            check(places[name], name)
        return operation, places


def _operation(root: Schema, template: str, method: str, found: Schema) -> Operation:
    parameters = [resolved(root, one) for one in found.get("parameters", ())]
    query = [one for one in parameters if one["in"] == "query"]
    checks = {one["name"]: compiled(root, one["schema"]) for one in parameters}
    numeric = {one["name"] for one in query if resolved(root, one["schema"])["type"] == "integer"}
    content = found.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    places = _PLACE.findall(template)
    if set(places) != {one["name"] for one in parameters if one["in"] == "path"}:
        raise ValueError(f"{template}: its places and parameters differ")
    return Operation(
        name=found["operationId"],
        method=method.upper(),
        template=template,
        role=found.get("x-role"),
        max_bytes=found.get("x-max-bytes", DEFAULT_BODY_BYTES) if content else 0,
        places={name: checks[name] for name in places},
        numbers={one["name"]: checks[one["name"]] for one in query if one["name"] in numeric},
        texts={one["name"]: checks[one["name"]] for one in query if one["name"] not in numeric},
        required=frozenset(one["name"] for one in query if one.get("required")),
        accepts=predicate(root, schema) if schema is not None else None,
        body=compiled(root, schema) if schema is not None else None,
        binary="application/octet-stream" in content,
    )


def compiled(root: Schema, schema: Schema) -> Check:
    """One check for all that a schema says."""
    schema = resolved(root, schema)
    checks: list[Check] = []
    for keyword, value in schema.items():
        if keyword not in _IGNORED and keyword not in _BESIDE:
            checks.append(_KEYWORDS[keyword](root, schema, value))
    if len(checks) == 1:
        return checks[0]

    def check(value: Any, place: str) -> None:
        for one in checks:
            one(value, place)

    return check


def _fails(place: str, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"{place}: {wanted}")


def _type(root: Schema, schema: Schema, value: Any) -> Check:
    names = [value] if isinstance(value, str) else value
    kinds = [_TYPES[name] for name in names]

    def check(given: Any, place: str) -> None:
        if not any(kind(given) for kind in kinds):
            raise _fails(place, f"{' or '.join(names)} wanted")

    return check


def _bounded(wanted: str, bad: Callable[[Any, Any], bool], kind: type) -> Callable[[Schema, Schema, Any], Check]:
    def make(root: Schema, schema: Schema, bound: Any) -> Check:
        def check(given: Any, place: str) -> None:
            if type(given) is kind and bad(given, bound):
                raise _fails(place, f"{wanted} {bound} wanted")

        return check

    return make


def _pattern(root: Schema, schema: Schema, value: str) -> Check:
    pattern = re.compile(value)  # anchored by ^ and $, and no value has a line break

    def check(given: Any, place: str) -> None:
        if type(given) is str and (pattern.fullmatch(given) is None):
            raise _fails(place, f"{value} wanted")

    return check


def _enum(root: Schema, schema: Schema, values: list[Any]) -> Check:
    def check(given: Any, place: str) -> None:
        if not any(given == value and type(given) is type(value) for value in values):
            raise _fails(place, f"one of {', '.join(map(str, values))} wanted")

    return check


def _items(root: Schema, schema: Schema, value: Any) -> Check:
    if value is False:  # only beside prefixItems, whose number maxItems says
        return lambda given, place: None
    each = compiled(root, value)

    def check(given: Any, place: str) -> None:
        if type(given) is list:
            for at, item in enumerate(given):
                each(item, f"{place}[{at}]")

    return check


def _prefix_items(root: Schema, schema: Schema, value: list[Schema]) -> Check:
    checks = [compiled(root, one) for one in value]

    def check(given: Any, place: str) -> None:
        if type(given) is list:
            for at, (one, item) in enumerate(zip(checks, given, strict=False)):
                one(item, f"{place}[{at}]")

    return check


def _properties(root: Schema, schema: Schema, value: Schema) -> Check:
    checks = {name: compiled(root, one) for name, one in value.items()}
    required = frozenset(schema.get("required", ()))

    def check(given: Any, place: str) -> None:
        if type(given) is not dict:
            return
        odd = (given.keys() - checks.keys()) | (required - given.keys())
        if odd:
            raise _fails(place, f"missing or unknown: {', '.join(sorted(name[:64] for name in odd))}")
        for name, item in given.items():
            checks[name](item, f"{place}.{name}")

    return check


def _any_of(root: Schema, schema: Schema, value: list[Schema]) -> Check:
    checks = [compiled(root, one) for one in value]

    def check(given: Any, place: str) -> None:
        failures = []
        for one in checks:
            try:
                one(given, place)
            except InvalidArgument as error:
                failures.append(str(error))
            else:
                return
        raise InvalidArgument(" or ".join(failures))

    return check


_BESIDE = {"required", "additionalProperties"}  # of properties: all of ours are closed
_KEYWORDS: dict[str, Callable[[Schema, Schema, Any], Check]] = {
    "type": _type,
    "minimum": _bounded("at least", lambda given, bound: given < bound, int),
    "maximum": _bounded("at most", lambda given, bound: given > bound, int),
    "minLength": _bounded("a length of at least", lambda given, bound: len(given) < bound, str),
    "maxLength": _bounded("a length of at most", lambda given, bound: len(given) > bound, str),
    "minItems": _bounded("a number of items of at least", lambda given, bound: len(given) < bound, list),
    "maxItems": _bounded("a number of items of at most", lambda given, bound: len(given) > bound, list),
    "pattern": _pattern,
    "enum": _enum,
    "items": _items,
    "prefixItems": _prefix_items,
    "properties": _properties,
    "anyOf": _any_of,
}
