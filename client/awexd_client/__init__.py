"""What trainers and inference engines import.

``WeightWriter`` in each training process, ``WorkerWeightsReader`` in each inference process, ``WeightReader`` in an
inference instance's control process. ``awexd_client.aio`` has the same names, awaitable. Errors are one tree, drawn in
:mod:`awexd_transports.errors`.
"""

from __future__ import annotations

from awexd_client.instance import WeightReader
from awexd_client.publication import Publication, Update
from awexd_client.reader import WorkerWeightsReader
from awexd_client.updates import UpdateResult
from awexd_client.writer import WeightWriter
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    BudgetExceeded,
    DaemonUnavailable,
    DeadlineExceeded,
    EpochChanged,
    IntegrityError,
    InvalidArgument,
    ManifestMismatch,
    ProtocolError,
    VersionConflict,
    VersionUnavailable,
)
from awexd_transports.layout import Shard

__all__ = [
    "AccessDenied",
    "AwexdError",
    "BudgetExceeded",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "EpochChanged",
    "IntegrityError",
    "InvalidArgument",
    "ManifestMismatch",
    "ProtocolError",
    "Publication",
    "Shard",
    "Update",
    "UpdateResult",
    "VersionConflict",
    "VersionUnavailable",
    "WeightReader",
    "WeightWriter",
    "WorkerWeightsReader",
]
