"""Builds awexd's C library into a wheel, or in place: for an editable install, or by ``python hatch_build.py``.

Without a C compiler, or where it fails, the wheel is pure Python and awexd copies by NumPy and torch.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

NATIVE = Path("transports", "awexd_transports", "native")
INSTALLED = Path("awexd_transports", "native")
COMPILERS = ("cc", "gcc", "clang")
# No -march: a wheel goes to other machines.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror=implicit"]


class BuildFailed(Exception):
    """There is no C library; the text says why."""


def build(native: Path, into: Path) -> Path:
    """Compiles the C source in the folder ``native`` to a library in the folder ``into``; returns its path.

    The same source gives the same bytes. A process that has the old library open keeps it.

    Raises:
        BuildFailed: no compiler, or it failed; an older library is left as it was.
    """
    described = _described(native)
    stamp = f'-DAWEXD_SOURCE_HASH="{described.source_hash(native)}"'
    names = [path.name for path in described.source_files(native) if path.suffix == ".c"]
    library: Path = into / described.LIBRARY
    try:
        with TemporaryDirectory(dir=into) as scratch:
            made = Path(scratch, library.name).absolute()
            _compile([*_compiler(), *FLAGS, *WARNINGS, stamp, "-o", str(made), *names], native)
            made.replace(library)
    except OSError as error:
        raise BuildFailed(str(error)) from error
    return library


def _described(native: Path) -> ModuleType:
    """The package ``native`` itself, which has the library's name and how its source is hashed."""
    spec = importlib.util.spec_from_file_location("awexd_native_described", native / "__init__.py")
    if spec is None or spec.loader is None:
        raise BuildFailed(f"{native} is no package")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiler() -> list[str]:
    """``$CC``, which may have arguments; otherwise the first that is there."""
    given = shlex.split(os.environ.get("CC", ""))
    found = given or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found:
        raise BuildFailed(f"no C compiler: neither $CC is set, nor is one of {', '.join(COMPILERS)} there")
    return found


def _compile(command: list[str], folder: Path) -> None:
    # In the source's folder, so that no path of this machine gets into the library.
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).strip()
        raise BuildFailed(f"{shlex.join(command)} ended with status {error.returncode}\n{said}".strip()) from error
    except OSError as error:
        raise BuildFailed(f"{shlex.join(command)} did not run: {error}") from error
    sys.stderr.write(done.stderr)


class NativeBuildHook(BuildHookInterface[Any]):
    """hatchling's hook: the library goes into a wheel, or beside its source for an editable install."""

    _scratch: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = Path(self.root, NATIVE)
        try:
            if version == "editable":
                build(native, native)
            else:
                self._scratch = TemporaryDirectory()
                self._put(build(native, Path(self._scratch.name)), build_data)
        except BuildFailed as failure:
            self.app.display_warning(f"awexd goes without its C library, so copies are slower: {failure}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()  # hatchling has put the library into the wheel

    def _put(self, library: Path, build_data: dict[str, Any]) -> None:
        build_data["force_include"][str(library)] = str(INSTALLED / library.name)
        build_data["pure_python"] = False
        # The platform's plain name: manylinux and musllinux promise an old libc, which nobody has checked.
        platform = next(tag for tag in platform_tags() if "manylinux" not in tag and "musllinux" not in tag)
        build_data["tag"] = f"py3-none-{platform}"


def main() -> int:
    native = Path(__file__).parent / NATIVE
    try:
        print(build(native, native))
    except BuildFailed as failure:
        print(f"hatch_build.py: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
