"""What a control process tells SGLang's scheduler processes: one small JSON object in a tensor of bytes.

SGLang's endpoint for weights takes a pickle of named tensors, so that the JSON travels as one: :func:`pickled` writes
it by hand, always of the same form, and nothing here ever reads one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from awexd.protocol import MAX_DEADLINE_MS, MAX_STEP
from awexd_transports.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

LOADER = "awexd_client.sglang.load"
"""``--custom-weight-loader``, and the ``load_format`` of our calls."""
NAME = "awexd"
"""Of the only tensor."""
MAX_BYTES = 4096
ACTIONS = ("stage", "apply", "abandon", "verify")

# Protocol 2: [("awexd", torch.ByteTensor([...]))]; each element is BININT1, "K" and the byte.
_HEAD = b"\x80\x02]X" + len(NAME).to_bytes(4, "little") + NAME.encode() + b"ctorch\nByteTensor\n]("
_TAIL = b"e\x85R\x86a."


@dataclass(frozen=True, slots=True)
class Control:
    """One call to every worker of an engine.

    Attributes:
        do: one of ``ACTIONS``.
        job, engine, socket: those of the workers' readers, which are made at the first call.
        timeout: seconds.
        epoch, step: for ``stage`` the step, or None for the next; for ``apply`` the version that must be staged.
        direct: False has the model load everything itself.
        checkpoint, token: for ``verify``: what to compare with, and what the daemon is told that it was for.
    """

    do: str
    job: str
    engine: str
    timeout: float
    socket: str | None = None
    epoch: int | None = None
    step: int | None = None
    direct: bool = True
    checkpoint: str | None = None
    token: str | None = None

    def encoded(self) -> bytes:
        """Raises InvalidArgument: too long."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        if len(body) > MAX_BYTES:
            raise InvalidArgument(f"names too long: {len(body)} bytes, {MAX_BYTES} at most")
        return body

    @classmethod
    def decoded(cls, body: bytes) -> Control:
        """Raises InvalidArgument: it is not what ``encoded`` gives."""
        if len(body) > MAX_BYTES:
            raise InvalidArgument(f"a control message of {len(body)} bytes, {MAX_BYTES} at most")
        try:
            said = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"a control message must be JSON: {error}") from error
        if not isinstance(said, dict) or said.keys() != {field.name for field in fields(cls)}:
            raise InvalidArgument("a control message must have exactly the fields of Control")
        for name, kind in get_type_hints(cls).items():
            wrong = not isinstance(said[name], kind) or (isinstance(said[name], bool) and kind is not bool)
            if wrong and not (kind is float and type(said[name]) is int):
                raise InvalidArgument(f"control message: {name} is {said[name]!r:.100}")
        control = cls(**said)
        if control.do not in ACTIONS:
            raise InvalidArgument(f"control message: do is {control.do!r:.100}, not one of {', '.join(ACTIONS)}")
        if not 0 <= control.timeout <= MAX_DEADLINE_MS / 1000:
            raise InvalidArgument(f"control message: timeout is {control.timeout}")
        if any(number is not None and not 0 <= number <= MAX_STEP for number in (control.epoch, control.step)):
            raise InvalidArgument("control message: epoch or step out of range")
        return control


def control_in(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Control:
    """The control message that a loader was given.

    Raises:
        InvalidArgument: something else is in it.
    """
    given = list(named_tensors)
    if len(given) != 1 or given[0][0] != NAME:
        raise InvalidArgument(f"{LOADER} takes one tensor called {NAME!r}, from SGLangServer or SGLangWorkers")
    tensor: Any = given[0][1]
    if str(tensor.dtype) != "torch.uint8" or tensor.ndim != 1 or tensor.numel() > MAX_BYTES:
        raise InvalidArgument(f"{NAME}: {tensor.dtype} {list(tensor.shape)}, not at most {MAX_BYTES} bytes")
    return Control.decoded(bytes(tensor.tolist()))


def pickled(body: bytes) -> bytes:
    """The pickle of ``[("awexd", <uint8 tensor of body>)]``, of ``torch.ByteTensor`` and small integers alone."""
    return _HEAD + b"".join(b"K%c" % byte for byte in body) + _TAIL
