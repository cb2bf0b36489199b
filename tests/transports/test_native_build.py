"""The C library is built into wheels and source trees, refused where stale, done without where nothing compiles."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hatch_build
from awexd_transports import native

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "hatch_build.py", "awexd", "client", "transports")
INSTALLED = "awexd_transports/native/" + native.LIBRARY
ADVICE = "install a C compiler (cc, gcc, clang, or the one that $CC names), then run `python hatch_build.py`"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree of its own, without anything built, and no git checkout."""
    made = tmp_path / "tree"
    made.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, made / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / part, made)
    return made


@pytest.fixture
def source(tree: Path) -> Path:
    """The folder of the C source in such a tree."""
    return tree / hatch_build.NATIVE


def _run(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60, check=False)


def _built(tree: Path, target: str, **environment: str) -> tuple[Path, str]:
    """The one file that hatchling made of the tree, and what it said."""
    done = _run(tree, "-m", "hatchling", "build", "-t", target, "-d", "out", **environment)
    assert done.returncode == 0, done.stderr
    (made,) = (tree / "out").iterdir()
    return made, done.stdout + done.stderr


def _purelib(wheel: zipfile.ZipFile) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    return wheel.read(name).decode().partition("Root-Is-Purelib: ")[2].split()[0]


def test_library_is_there_and_made_from_this_source() -> None:
    native.load.cache_clear()
    assert native.load() is not None, f"{hatch_build.NATIVE} has no fresh library: {ADVICE}"


def test_load_opens_the_library_once() -> None:
    assert native.load() is native.load()


class TestBuild:
    def test_same_bytes_each_time_without_a_warning_or_a_path(
        self, tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        made = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            made.append(hatch_build.build(tree / hatch_build.NATIVE, tmp_path / name).read_bytes())
            assert os.listdir(tmp_path / name) == [native.LIBRARY]
        assert made[0] == made[1]
        assert str(tmp_path).encode() not in made[0]
        assert capfd.readouterr().err == ""

    def test_compilers_warnings_are_shown(self, source: Path, capfd: pytest.CaptureFixture[str]) -> None:
        (source / "odd.c").write_text("void odd(int unused) {}\n")
        hatch_build.build(source, source)
        assert "unused" in capfd.readouterr().err

    def test_compiler_may_have_arguments(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = " ".join(hatch_build._compiler())
        monkeypatch.setenv("CC", f"{compiler} -Dodd=1")
        (source / "odd.c").write_text("#ifndef odd\n#error no arguments\n#endif\nint one(void) { return odd; }\n")
        assert hatch_build.build(source, source).exists()

    def test_script_builds_in_place_and_prints_the_path(self, tree: Path, source: Path) -> None:
        done = _run(tree, "hatch_build.py")
        assert (done.returncode, done.stderr) == (0, "")
        assert Path(done.stdout.strip()) == source / native.LIBRARY
        assert native.opened(source) is not None

    def test_script_says_what_failed(self, tree: Path, source: Path) -> None:
        done = _run(tree, "hatch_build.py", CC="false")
        assert done.returncode == 1
        assert "false -O3" in done.stderr
        assert not (source / native.LIBRARY).exists()


class TestLoading:
    def test_missing_library_is_logged_for_debugging(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            assert native.opened(tmp_path) is None
        assert [record.levelno for record in caplog.records] == [logging.DEBUG]
        assert native.LIBRARY in caplog.text

    def test_file_that_is_no_library_is_refused(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / native.LIBRARY).write_text("no library")
        with caplog.at_level(logging.DEBUG):
            assert native.opened(tmp_path) is None
        assert [record.levelno for record in caplog.records] == [logging.DEBUG]

    def test_library_without_our_functions_is_refused(self, source: Path, caplog: pytest.LogCaptureFixture) -> None:
        for path in native.source_files(source):
            path.unlink()
        (source / "other.c").write_text("int other;\n")
        hatch_build.build(source, source)
        with caplog.at_level(logging.DEBUG):
            assert native.opened(source) is None
        assert "awexd_native_version" in caplog.text

    @pytest.mark.parametrize("name", ["copy.c", "new.h"])
    def test_library_older_than_its_source_is_refused(
        self, source: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        hatch_build.build(source, source)
        with (source / name).open("a") as file:
            file.write("/* edited */\n")
        assert native.opened(source) is None
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "not made from" in caplog.text
        assert "hatch_build.py" in caplog.text

    def test_library_of_another_version_is_refused(
        self, source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hatch_build.build(source, source)
        monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
        assert native.opened(source) is None
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert f"has version {native.VERSION - 1}" in caplog.text

    def test_build_replaces_a_library_that_is_open(self, source: Path) -> None:
        path = hatch_build.build(source, source)
        kept = ctypes.CDLL(str(path))
        before = path.stat().st_ino
        hatch_build.build(source, source)
        assert path.stat().st_ino != before
        assert kept.awexd_native_version() == native.VERSION


class TestWheel:
    def test_fits_every_python_of_this_platform_and_holds_the_library(self, tree: Path, tmp_path: Path) -> None:
        made, _ = _built(tree, "wheel")
        python, abi, platform = made.stem.split("-")[-3:]
        assert (python, abi) == ("py3", "none")
        assert platform.startswith("linux_")
        with zipfile.ZipFile(made) as wheel:
            assert [name for name in wheel.namelist() if name.endswith((".so", ".c", ".h"))] == [INSTALLED]
            assert _purelib(wheel) == "false"
            wheel.extract(INSTALLED, tmp_path)
        assert native.opened(tmp_path / Path(INSTALLED).parent) is not None
        assert not (tree / hatch_build.NATIVE / native.LIBRARY).exists()

    @pytest.mark.parametrize(
        ("environment", "said"),
        [
            ({"CC": "false"}, "false -O3"),
            ({"CC": "no-such-compiler"}, "no-such-compiler -O3"),
            ({"CC": "", "PATH": ""}, "no C compiler"),
        ],
    )
    def test_is_pure_where_nothing_compiles(self, tree: Path, environment: dict[str, str], said: str) -> None:
        hatch_build.build(tree / hatch_build.NATIVE, tree / hatch_build.NATIVE)  # must not get into the wheel
        made, output = _built(tree, "wheel", **environment)
        assert made.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(made) as wheel:
            assert [name for name in wheel.namelist() if name.endswith((".so", ".c", ".h"))] == []
            assert "awexd_transports/native/__init__.py" in wheel.namelist()
            assert _purelib(wheel) == "true"
        assert "goes without its C library" in output
        assert said in output

    def test_is_pure_where_the_source_does_not_compile(self, tree: Path) -> None:
        (tree / hatch_build.NATIVE / "copy.c").write_text("int f(void) { return unheard_of(); }\n")
        made, output = _built(tree, "wheel")
        assert made.name.endswith("-py3-none-any.whl")
        assert "unheard_of" in output

    def test_of_an_sdist_holds_the_library(self, tree: Path, tmp_path: Path) -> None:
        hatch_build.build(tree / hatch_build.NATIVE, tree / hatch_build.NATIVE)
        made, _ = _built(tree, "sdist")
        with tarfile.open(made) as sdist:
            assert [name for name in sdist.getnames() if name.endswith(".so")] == []
            sdist.extractall(tmp_path / "sdist", filter="data")
        (unpacked,) = (tmp_path / "sdist").iterdir()
        with zipfile.ZipFile(_built(unpacked, "wheel")[0]) as wheel:
            assert INSTALLED in wheel.namelist()


class TestEditable:
    def test_has_the_library_beside_its_source(self, tree: Path, source: Path) -> None:
        made, _ = _built(tree, "wheel:editable")
        assert native.opened(source) is not None
        with zipfile.ZipFile(made) as wheel:
            assert [name for name in wheel.namelist() if name.endswith(".so")] == []

    def test_installs_without_a_compiler(self, tree: Path, source: Path) -> None:
        _, output = _built(tree, "wheel:editable", CC="false")
        assert "goes without its C library" in output
        assert not (source / native.LIBRARY).exists()
