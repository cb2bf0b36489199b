"""Packages that have no build for a machine without a GPU: they can be imported, and whatever is called says so."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


class Absent:
    """Any attribute of an absent package; may be a default value, a base of names, an entry of a table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_arguments: object, **_options: object) -> object:
        raise RuntimeError(f"{self._name} needs a GPU build, which is not here")

    def __repr__(self) -> str:
        return f"<absent {self._name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Absent) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


def attribute_of(package: str) -> Callable[[str], Absent]:
    """A module's ``__getattr__``."""

    def attribute(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{package}.{name}")

    return attribute


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every submodule of one package exists, and is empty but for its ``__getattr__``."""

    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = attribute_of(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def stand_in(package: str) -> Callable[[str], Absent]:
    """Makes all submodules of ``package`` importable; returns its own ``__getattr__``."""
    sys.meta_path.insert(0, _Submodules(package))
    return attribute_of(package)
