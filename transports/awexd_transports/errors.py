"""The one tree of errors, shared by the daemon, the wire and the client.

AwexdError
├── InvalidArgument (ValueError)        the call itself is wrong
├── ManifestMismatch (ValueError)       tensors of the two sides do not fit; names in .missing, .unexpected, .mismatched
├── VersionConflict (ValueError)        a step, epoch or rank that may not be used now
├── AccessDenied (PermissionError)      this user may not do that
├── DaemonUnavailable (ConnectionError) no daemon there, or it went away
├── ProtocolError (ConnectionError)     the other end does not speak our protocol, or not well
├── DeadlineExceeded (TimeoutError)     names who was waited for, in which phase
├── VersionUnavailable (LookupError)    that version is not held; says which are
├── EpochChanged (RuntimeError)         the job is in a newer epoch
├── IntegrityError (RuntimeError)       bytes are not what they should be
└── BudgetExceeded (MemoryError)        no room; says how much is needed and how much there is
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

MAX_NAMED = 8
"""How many names a message spells out; the attributes hold all of them."""


class AwexdError(Exception):
    """Base of every error that awexd raises. ``details`` holds plain JSON values only."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return self.message


class InvalidArgument(AwexdError, ValueError):
    """The call itself is wrong: nothing was done."""

    code = "invalid_argument"


class ManifestMismatch(AwexdError, ValueError):
    """The tensors of the two sides do not fit; no byte was touched.

    Attributes:
        missing: names wanted by the reader that no writer has (or has only in part).
        unexpected: names published that no worker of the engine declares.
        mismatched: name to what differs (shape, dtype, layout).
    """

    code = "manifest_mismatch"

    def __init__(
        self,
        message: str,
        details: Mapping[str, Any] | None = None,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, details)
        given: dict[str, Any] = {"missing": sorted(missing), "unexpected": sorted(unexpected), "mismatched": mismatched}
        for key, value in given.items():
            if value:
                self.details[key] = value

    @property
    def missing(self) -> list[str]:
        return list(self.details.get("missing", ()))

    @property
    def unexpected(self) -> list[str]:
        return list(self.details.get("unexpected", ()))

    @property
    def mismatched(self) -> dict[str, str]:
        return dict(self.details.get("mismatched", ()))

    @classmethod
    def between(
        cls, subject: str, *, missing: Iterable[str] = (), unexpected: Iterable[str] = (), mismatched: Mapping[str, str]
    ) -> ManifestMismatch:
        """An error whose message names the first tensors of each kind."""
        missing, unexpected = sorted(missing), sorted(unexpected)
        parts = [
            f"{len(found)} {kind} ({abbreviate(found)})"
            for kind, found in (("missing", missing), ("unexpected", unexpected))
            if found
        ]
        if mismatched:
            named = [f"{name}: {why}" for name, why in mismatched.items()]
            parts.append(f"{len(named)} mismatched ({abbreviate(named)})")
        return cls(
            f"{subject}: " + "; ".join(parts), missing=missing, unexpected=unexpected, mismatched=dict(mismatched)
        )


class VersionConflict(AwexdError, ValueError):
    """A step, epoch, attempt or rank that may not be used now."""

    code = "version_conflict"


class AccessDenied(AwexdError, PermissionError):
    """This user may not do that."""

    code = "access_denied"


class DaemonUnavailable(AwexdError, ConnectionError):
    """No daemon answers at the socket, or it went away in the middle."""

    code = "daemon_unavailable"


class ProtocolError(AwexdError, ConnectionError):
    """A malformed, oversized or unknown message; the connection is over."""

    code = "protocol_error"


class DeadlineExceeded(AwexdError, TimeoutError):
    """A wait ended without its event; the message names who was waited for and in which phase."""

    code = "deadline_exceeded"


class VersionUnavailable(AwexdError, LookupError):
    """That version is not held (any more); the message names those that are."""

    code = "version_unavailable"


class EpochChanged(AwexdError, RuntimeError):
    """The job is in a newer epoch than the caller; ``details`` has ``epoch`` and ``step``."""

    code = "epoch_changed"


class IntegrityError(AwexdError, RuntimeError):
    """Bytes are not what their writer wrote; names the tensor and its first differing element where known."""

    code = "integrity_error"


class BudgetExceeded(AwexdError, MemoryError):
    """No room in host memory; the message says what was needed and what there is."""

    code = "budget_exceeded"


ERRORS: dict[str, type[AwexdError]] = {
    cls.code: cls
    for cls in (
        AwexdError,
        InvalidArgument,
        ManifestMismatch,
        VersionConflict,
        AccessDenied,
        DaemonUnavailable,
        ProtocolError,
        DeadlineExceeded,
        VersionUnavailable,
        EpochChanged,
        IntegrityError,
        BudgetExceeded,
    )
}
"""Wire code to class."""


def from_wire(code: str, message: str, details: Mapping[str, Any]) -> AwexdError:
    """The error that a peer sent; an unknown code becomes a plain AwexdError that names it."""
    cls = ERRORS.get(code)
    if cls is None:
        return AwexdError(f"{code}: {message}", details)
    return cls(message, details)


def abbreviate(names: Iterable[str], limit: int = MAX_NAMED) -> str:
    """Names joined by commas, at most ``limit`` of them, with a count of the rest."""
    listed = list(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown}, and {len(listed) - limit} more"
