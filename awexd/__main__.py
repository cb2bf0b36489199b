"""``python -m awexd``."""

from __future__ import annotations

import sys

from awexd.cli import main

if __name__ == "__main__":
    sys.exit(main())
