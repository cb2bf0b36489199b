from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 600
PIN = re.compile(r"([A-Za-z0-9_.-]+)==([0-9][0-9A-Za-z.+]*)")
# In two parts, so that this file may name them.
MACHINE_PATHS = re.compile("/" + r"(work|root)/|/home/[a-z]")


def _files(*suffixes: str) -> list[Path]:
    """Text files of the project: what git tracks or would."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip("needs a git checkout: run it in a clone")
    paths = [ROOT / name for name in done.stdout.splitlines()]
    return [path for path in paths if path.is_file() and (path.suffix in suffixes or not suffixes)]


def _tests() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def _pins(*files: Path) -> dict[str, str]:
    """What the files pin; without files, those of our own environment."""
    pins: dict[str, str] = {}
    for file in files or sorted((ROOT / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            text = line.partition("#")[0].strip()
            if not text or text.startswith("-r "):
                continue
            pin = PIN.fullmatch(text)
            assert pin, f"{file.name}: {text!r} is not an exact pin"
            assert pin[1] not in pins, f"{pin[1]} is pinned twice"
            pins[pin[1]] = pin[2]
    return pins


def _within(version: str, constraint: str) -> bool:
    """Whether ``version`` satisfies ">=a,<b", the only form that pyproject.toml uses."""
    low, high = re.fullmatch(r">=([0-9.]+),<([0-9.]+)", constraint).groups()  # type: ignore[union-attr]
    return _numbers(low) <= _numbers(version) < _numbers(high)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def test_every_dependency_has_an_exact_pin_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    ranges = {re.split("[<>=]", text)[0]: re.sub("^[^<>=]+", "", text) for names in lists for text in names}
    pins = _pins()
    assert ranges.keys() - pins.keys() == set()
    assert [name for name, constraint in ranges.items() if not _within(pins[name], constraint)] == []


def test_every_engine_that_the_makefile_names_has_a_list_of_exact_pins() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.search("^ENGINES := (.*)$", makefile, re.MULTILINE)
    assert named
    lists = {path.stem: path for path in (ROOT / "requirements" / "engines").glob("*.txt")}
    assert lists.keys() == set(named[1].split())
    for path in lists.values():
        assert {"torch", "orjson", "hatchling"} <= _pins(path).keys(), path.name


def test_version_stands_in_one_place() -> None:
    text = (ROOT / "awexd" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "([0-9.]+)"$', text, re.MULTILINE)
    assert version
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_file_names_a_machine_path() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert named == []


def test_no_file_grows_too_long() -> None:
    long = [path.relative_to(ROOT) for path in _files(".py") if len(path.read_text().splitlines()) > MAX_LINES]
    assert long == []


def _sleeps(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep":
            yield node.lineno


def test_no_test_sleeps() -> None:
    assert [f"{path.relative_to(ROOT)}:{line}" for path, tree in _tests() for line in _sleeps(tree)] == []
