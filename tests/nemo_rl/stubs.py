"""Stands in for what NeMo-RL imports and its data plane does not use: modules that are empty but for names.

NeMo-RL's data plane imports its message and batch helpers, which import libraries for models, data sets and logs. None
of them is needed by the tests that run here. Names that a test asks for with ``importorskip`` or in a ``try`` are not
in the list, so that such a test is skipped as it would be in NeMo-RL's own environment without them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import typing_extensions

__all__ = ["MODULES", "install"]

#: Top-level modules that are stood in for where they are not installed.
MODULES = frozenset(
    {
        *("absl", "datasets", "debugpy", "decord", "fastapi", "httpx", "huggingface_hub", "math_verify", "mlflow"),
        *("nccl", "nemo_automodel", "num2words", "nvtx", "pandas", "pynvml", "scipy", "soundfile", "swanlab", "sympy"),
        *("tensorboard", "torchdata", "torchvision", "tqdm", "transformers", "uvicorn", "wandb"),
    }
)


class _Named(type):
    """A class of which every public attribute is such a class too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Stub(ModuleType):
    """A module in which every public name is a class of that name."""

    __path__: ClassVar[list[str]] = []
    __version__ = "5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {"__module__": self.__name__, "__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ``names`` and whatever lies in them."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module whose top-level name is one of ``names``."""
        del path, target
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make an empty module."""
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the names are made when they are asked for."""
        del module


def install(names: frozenset[str] = MODULES) -> list[str]:
    """Make the modules that are not installed importable; return their names."""
    if sys.version_info < (3, 12):  # pydantic, of which NeMo-RL's configs are, takes no other before Python 3.12
        typing.TypedDict = typing_extensions.TypedDict
    missing = sorted(name for name in names if importlib.util.find_spec(name) is None)
    if missing:
        sys.meta_path.append(_Finder(frozenset(missing)))
    return missing
