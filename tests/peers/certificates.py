"""Certificates for tests of TLS, made by the command openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make certificates")


def made(folder: Path, name: str) -> dict[str, str]:
    """A certificate for 127.0.0.1 that is its own authority: ``authority``, ``certificate`` and ``key`` as files."""
    key, certificate = str(folder / f"{name}.key"), str(folder / f"{name}.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return {"authority": certificate, "certificate": certificate, "key": key}
