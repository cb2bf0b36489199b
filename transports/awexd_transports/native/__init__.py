"""The optional C library: found here if a C compiler was there when awexd was built (``hatch_build.py``).

It knows nothing of Python, so it fits every version of it. The build runs this file: it imports nothing of awexd.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from hashlib import sha256
from pathlib import Path

__all__ = ["LIBRARY", "VERSION", "load"]

LIBRARY = "libawexd_copy.so"
VERSION = 2
"""Of the library's functions; ``awexd_native_version`` in copy.c returns it."""

_HERE = Path(__file__).parent
_log = logging.getLogger(__name__)


@cache
def load() -> ctypes.CDLL | None:
    """The library, opened once in a process; None where there is none of this version that loads."""
    return opened(_HERE)


def opened(folder: Path) -> ctypes.CDLL | None:
    """As ``load``, of a library in another folder, and not kept."""
    path = folder / LIBRARY
    try:
        library = ctypes.CDLL(str(path))
        version, source = library.awexd_native_version, library.awexd_native_source
    except (OSError, AttributeError) as error:
        _log.debug("copies go without the C library: %s", error)
        return None
    version.restype, source.restype = ctypes.c_uint64, ctypes.c_char_p
    version.argtypes = source.argtypes = []
    if version() != VERSION:
        _warn(path, f"has version {version()}, not {VERSION}")
        return None
    if source_files(folder) and source().decode() != source_hash(folder):
        _warn(path, "is not made from the C source beside it")
        return None
    return library


def _warn(path: Path, why: str) -> None:
    advice = "install awexd again, or run hatch_build.py in its source tree"
    _log.warning("copies go without the C library, which is slower: %s %s; %s", path, why, advice)


def source_files(folder: Path) -> list[Path]:
    """The C source, which only a source tree has."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def source_hash(folder: Path) -> str:
    """Of the source's names and content; 32 hexadecimal digits."""
    total = sha256()
    for path in source_files(folder):
        total.update(path.name.encode() + b"\0" + sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]
