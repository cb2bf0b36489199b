from __future__ import annotations

import io
import json
import pickle  # noqa: TID251 - what SGLang does with our bytes
from typing import Any

import pytest
import torch

from awexd_client import InvalidArgument
from awexd_client.sglang.control import MAX_BYTES, NAME, Control, control_in, pickled

CONTROL = Control("apply", "owner/grpo", "rollout-0", 60.0, "/run/awexd/awexd.sock", 1, 7)


class Unpickler(pickle.Unpickler):
    """The real one, which notes what it is asked for."""

    def __init__(self, body: bytes) -> None:
        super().__init__(io.BytesIO(body))
        self.found: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        self.found.append((module, name))
        return super().find_class(module, name)


@pytest.mark.parametrize("length", [0, 1, 255, 256, MAX_BYTES])
def test_pickle_is_of_the_very_tensor(length: int) -> None:
    body = bytes(at % 256 for at in range(length))
    unpickler = Unpickler(pickled(body))
    ((name, tensor),) = unpickler.load()
    assert name == NAME
    assert tensor.dtype == torch.uint8
    assert torch.equal(tensor, torch.tensor(list(body), dtype=torch.uint8))
    assert unpickler.found == [("torch", "ByteTensor")], "SGLang's own unpickler allows few names"


def test_message_arrives_as_it_was() -> None:
    named = Unpickler(pickled(CONTROL.encoded())).load()
    assert control_in(named) == CONTROL
    assert Control.decoded(Control("stage", "j", "e", 1).encoded()) == Control("stage", "j", "e", 1)


def _tensor(body: bytes) -> torch.Tensor:
    return torch.tensor(list(body), dtype=torch.uint8)


@pytest.mark.parametrize(
    "named",
    [
        [],
        [("a", _tensor(CONTROL.encoded()))],
        [(NAME, _tensor(CONTROL.encoded()))] * 2,
        [(NAME, torch.zeros(3))],
        [(NAME, torch.zeros(1, 3, dtype=torch.uint8))],
        [(NAME, torch.zeros(MAX_BYTES + 1, dtype=torch.uint8))],
    ],
)
def test_something_else_than_one_small_tensor_is_refused(named: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(InvalidArgument):
        control_in(named)


@pytest.mark.parametrize(
    "wrong",
    [
        {"do": "erase"},
        {"do": 1},
        {"job": None},
        {"engine": ["e"]},
        {"timeout": "60"},
        {"timeout": True},
        {"timeout": -1.0},
        {"timeout": float("nan")},
        {"timeout": 1e30},
        {"socket": 3},
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"epoch": 1 << 80},
        {"direct": 1},
        {"more": 1},
    ],
)
def test_field_that_is_wrong_is_refused(wrong: dict[str, object]) -> None:
    said = json.loads(CONTROL.encoded()) | wrong
    with pytest.raises(InvalidArgument, match="control message"):
        Control.decoded(json.dumps(said).encode())


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"{}", b"null", b"[" * 4000, b"{" * 3])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="control message"):
        Control.decoded(body)


def test_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="too long"):
        Control("stage", "j" * MAX_BYTES, "e", 1.0).encoded()
