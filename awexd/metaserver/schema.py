"""``openapi.json`` is the one definition of routes, roles, limits and what requests hold: this turns it into checks.

What bodies hold is read by :mod:`awexd.metaserver.bodies`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson

from awexd.metaserver.bodies import Schema, Types, check, reader
from awexd.metaserver.http import Refused
from awexd_transports.errors import InvalidArgument

DEFAULT_BODY_BYTES = 64 << 10
_PLACE = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route.

    Attributes:
        role: the least that may call it; None: anyone.
        places: types of what stands in the path.
        numbers, texts: types of query parameters by name; ``required`` of them must be given.
        read: of a JSON body, its value; None where it has none, or is bytes.
    """

    name: str
    method: str
    template: str
    role: str | None
    max_bytes: int
    places: Mapping[str, Any]
    numbers: Mapping[str, Any]
    texts: Mapping[str, Any]
    required: frozenset[str]
    read: Callable[[bytes], Any] | None
    binary: bool

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
                check(found[name], self.numbers[name], name)
            else:
                found[name] = value
                check(value, self.texts[name], name)
        if self.required - found.keys():
            raise InvalidArgument(f"query: missing {', '.join(sorted(self.required - found.keys()))}")
        return found


def document() -> bytes:
    """The document itself."""
    return resources.files("awexd.metaserver").joinpath("openapi.json").read_bytes()


def operations(body: bytes) -> list[Operation]:
    """What the document describes."""
    root = orjson.loads(body)
    types = Types(root)
    return [
        _operation(types, template, method, found)
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
        for name, kind in operation.places.items():
            check(places[name], kind, name)
        return operation, places


def _operation(types: Types, template: str, method: str, found: Schema) -> Operation:
    parameters = [types.resolved(one) for one in found.get("parameters", ())]
    kinds = {one["name"]: types.of(one["schema"]) for one in parameters}
    query = [one for one in parameters if one["in"] == "query"]
    numeric = {one["name"] for one in query if types.resolved(one["schema"])["type"] == "integer"}
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
        places={name: kinds[name] for name in places},
        numbers={one["name"]: kinds[one["name"]] for one in query if one["name"] in numeric},
        texts={one["name"]: kinds[one["name"]] for one in query if one["name"] not in numeric},
        required=frozenset(one["name"] for one in query if one.get("required")),
        read=reader(types.of(schema)) if schema is not None else None,
        binary="application/octet-stream" in content,
    )
