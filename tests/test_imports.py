from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "awexd": ROOT / "awexd",
    "awexd_client": ROOT / "client" / "awexd_client",
    "awexd_transports": ROOT / "transports" / "awexd_transports",
}
# The command modules sit on top of all three packages and import lazily.
COMMANDS = {"awexd/cli.py", "awexd/cluster.py", "awexd/ctl.py", "awexd/verifying.py"}
COMMAND_FOLDERS = ("awexd/bench/", "awexd/demo/", "awexd/dryrun/")
IMPORT_SECONDS = 5.0


def _loaded_by(module: str) -> set[str]:
    """Top-level modules in a fresh interpreter after it imported ``module``."""
    script = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}}, sep='\\n')"
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("awexd", {"torch", "aiohttp", "uvloop", "numpy"}),
        ("awexd.systemd", {"torch", "aiohttp", "uvloop", "numpy"}),
        ("awexd.cli", {"torch", "transformers", "matplotlib"}),
        ("awexd.ctl", {"torch", "transformers", "matplotlib"}),
        ("awexd.daemon", {"torch", "transformers", "aiohttp"}),
        ("awexd.peers.fetcher", {"torch", "aiohttp"}),
        ("awexd.peers.tcp", {"torch", "aiohttp"}),
        ("awexd_transports.registry", {"torch", "aiohttp", "uvloop", "numpy"}),
        ("awexd_transports.errors", {"torch", "aiohttp", "uvloop"}),
        ("awexd_transports.layout", {"torch", "aiohttp", "uvloop"}),
        ("awexd_transports.plan", {"torch", "aiohttp", "uvloop"}),
        ("awexd_client", {"torch", "aiohttp", "uvloop"}),
    ],
)
def test_import_loads_nothing_heavy(module: str, unwanted: set[str]) -> None:
    started = time.perf_counter()
    loaded = _loaded_by(module)
    seconds = time.perf_counter() - started
    assert not loaded & unwanted
    assert seconds < IMPORT_SECONDS


def test_import_of_a_heavy_module_is_seen() -> None:
    assert "numpy" in _loaded_by("numpy.linalg")


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and top-level module of every import, lazy ones and those for type checkers included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module.partition(".")[0]


def _may_import(path: str, package: str) -> set[str]:
    """Which of the three packages the module at ``path`` may import, its own included."""
    if package == "awexd_transports":
        return {"awexd_transports"}
    if package == "awexd" and not (path in COMMANDS or path.startswith(COMMAND_FOLDERS)):
        return {"awexd_transports", "awexd"}
    return set(PACKAGES)


def _wrong_way(path: str, package: str, source: str) -> list[str]:
    allowed = _may_import(path, package)
    return [
        f"{path}:{line} imports {name}"
        for line, name in _imports(ast.parse(source))
        if name in PACKAGES.keys() - allowed
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    wrong, seen = [], 0
    for file in sorted(PACKAGES[package].rglob("*.py")):
        seen += 1
        wrong += _wrong_way(str(file.relative_to(ROOT)), package, file.read_text())
    assert seen
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "package", "source", "wrong"),
    [
        ("transports/awexd_transports/plan.py", "awexd_transports", "import awexd.store", True),
        ("transports/awexd_transports/plan.py", "awexd_transports", "def f():\n    from awexd_client import x", True),
        ("transports/awexd_transports/plan.py", "awexd_transports", "from awexd_transports.layout import Box", False),
        ("awexd/store.py", "awexd", "from awexd_client.session import Session", True),
        ("awexd/store.py", "awexd", "from awexd_transports import plan", False),
        ("awexd/ctl.py", "awexd", "from awexd_client import Session", False),
        ("awexd/demo/run.py", "awexd", "import awexd_client", False),
        ("client/awexd_client/session.py", "awexd_client", "from awexd.protocol import Frame", False),
    ],
)
def test_wrong_way_import_is_seen(path: str, package: str, source: str, wrong: bool) -> None:
    assert bool(_wrong_way(path, package, source)) is wrong
