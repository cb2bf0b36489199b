"""Runs a command that ends when the demo's parent process does, however that ends.

The kernel keeps the parent-death signal over ``execve``, so the command itself needs to know nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> NoReturn:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the demo's parent process is gone")  # before the kernel knew of us
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
