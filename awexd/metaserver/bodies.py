"""What requests hold, as types that msgspec reads and checks at once, made from the schemas of ``openapi.json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

import msgspec

from awexd_transports.errors import InvalidArgument

Schema = Mapping[str, Any]

_SAID = {"type", "description", "default", "examples"}
_BOUNDS = {
    "minimum": "ge",
    "maximum": "le",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
}


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object whose properties are all known, and all there."""

    __getitem__ = object.__getattribute__


class Types:
    """The types of a document's schemas: as much of JSON Schema as ``openapi.json`` uses.

    A number is an integer: 1.0 is none. A keyword that is not known here is an error when the type is made.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[str, Any] = {}

    def resolved(self, schema: Schema) -> Schema:
        """What a reference stands for."""
        while "$ref" in schema:
            found: Any = self._root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema

    def of(self, schema: Schema) -> Any:
        """The type of the values that the schema describes."""
        name = schema.get("$ref")
        if name is None:
            return self._made(schema)
        if name not in self._known:
            self._known[name] = self.of(self.resolved(schema))
        return self._known[name]

    def _made(self, schema: Schema) -> Any:
        if "anyOf" in schema:
            _check_known(schema, {"anyOf"})
            return Union[tuple(map(self.of, schema["anyOf"]))]  # noqa: UP007 - of a tuple
        if "enum" in schema:
            _check_known(schema, {"enum"})
            return Literal[tuple(schema["enum"])]
        make = _KINDS[schema["type"]]
        return make(self, schema)

    def _array(self, schema: Schema) -> Any:
        if "prefixItems" not in schema:
            return _bounded(list[self.of(schema["items"])], schema, {"items"})  # type: ignore[misc]
        _check_known(schema, {"prefixItems", "items", "minItems", "maxItems"})
        items = schema["prefixItems"]
        if not schema["minItems"] == schema["maxItems"] == len(items) or schema["items"] is not False:
            raise ValueError("a tuple has a fixed length")
        return tuple[tuple(map(self.of, items))]  # type: ignore[misc]

    def _object(self, schema: Schema) -> Any:
        _check_known(schema, {"properties", "required", "additionalProperties"})
        properties = schema["properties"]
        if schema["additionalProperties"] is not False or set(schema.get("required", ())) != properties.keys():
            raise ValueError("what a request holds is all required, and nothing else")
        return msgspec.defstruct("Body", [(name, self.of(one)) for name, one in properties.items()], bases=(Body,))


def reader(kind: Any) -> Callable[[bytes], Any]:
    """Reads JSON text of that type.

    Its reader raises:
        InvalidArgument: what is wrong, and where (``$`` is the whole).
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(text: bytes) -> Any:
        try:
            return decode(text)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"body: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidArgument(f"the body is not JSON: {error}") from None

    return read


def check(value: Any, kind: Any, name: str) -> None:
    """
    Raises:
        InvalidArgument: the value called ``name`` is not of that type.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _bounded(kind: Any, schema: Schema, known: set[str]) -> Any:
    _check_known(schema, known | _BOUNDS.keys())
    bounds = {word: schema[keyword] for keyword, word in _BOUNDS.items() if keyword in schema}
    if "pattern" in schema:
        # Python's `$` also matches before a line break at the end.
        bounds["pattern"] = re.sub(r"\$$", r"\\Z", schema["pattern"])
    return Annotated[kind, msgspec.Meta(**bounds)] if bounds else kind


def _check_known(schema: Schema, known: set[str]) -> None:
    odd = schema.keys() - known - _SAID
    if odd:
        raise ValueError(f"keywords that are not known here: {sorted(odd)}")


_KINDS: dict[str, Callable[[Types, Schema], Any]] = {
    "integer": lambda types, schema: _bounded(int, schema, set()),
    "string": lambda types, schema: _bounded(str, schema, {"pattern"}),
    "boolean": lambda types, schema: _bounded(bool, schema, set()),
    "null": lambda types, schema: _bounded(type(None), schema, set()),
    "array": Types._array,
    "object": Types._object,
}
