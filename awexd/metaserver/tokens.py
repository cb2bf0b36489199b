"""Bearer tokens by role, from a file that nobody else can read."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from awexd_transports.errors import InvalidArgument

ROLES = ("reader", "node", "admin")
"""Each may do what those before it may."""
MAX_TOKENS = 256
MAX_FILE_BYTES = 1 << 20
_TOKEN = re.compile(r"[!-~]{16,512}")


def read_tokens(path: Path) -> list[tuple[str, str]]:
    """The (role, token) of each line; ``#`` begins a comment.

    Raises:
        InvalidArgument: it cannot be read, others can read it, or a line is not a role and a token.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidArgument(f"token file {path}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"token file {path}: not a file")
        if found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
            raise InvalidArgument(f"token file {path}: others must not be able to read or write it: chmod 600 {path}")
        lines = os.read(fd, MAX_FILE_BYTES).decode(errors="replace").splitlines()
    finally:
        os.close(fd)
    tokens = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in ROLES or not _TOKEN.fullmatch(words[1]):
            # Never the line itself: it may be a secret.
            raise InvalidArgument(
                f"token file {path}, line {number}: a role ({', '.join(ROLES)}) and a token of 16 to 512 "
                "printable characters are wanted"
            )
        tokens.append((words[0], words[1]))
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise InvalidArgument(f"token file {path}: {len(tokens)} tokens; 1 to {MAX_TOKENS} are wanted")
    return tokens


class Tokens:
    """Tells the role of a token in a time that says nothing about the tokens."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._key = secrets.token_bytes(32)
        self._roles = [(self._digest(token), ROLES.index(role)) for role, token in tokens]

    def level(self, token: str) -> int:
        """The highest role of that token, as an index of ``ROLES``; -1 where it has none."""
        digest, level = self._digest(token), -1
        for known, role in self._roles:
            if hmac.compare_digest(known, digest):
                level = max(level, role)
        return level

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode("latin-1", "replace"), "sha256")
