"""What is public is used or documented, and what has left ``asyncdp`` is still found there for one version."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncdp
from tests.seam.surface import MODULES

ROOT = Path(__file__).parents[2]
#: What users, authors of layers, and authors of transports import from.
PUBLIC = (*MODULES, "asyncdp.errors", "asyncdp.meta")


def _words(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


def _listed(path: Path) -> Iterator[str]:
    """The names in a module's ``__all__``, where it is a plain list."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            yield from (item.value for item in getattr(node.value, "elts", ()) if isinstance(item, ast.Constant))


def test_every_listed_name_is_used_or_documented() -> None:
    """In another module, in a test, or in the docs; else it has no business in ``__all__``."""
    tops = [ROOT / top for top in ("asyncdp", "middleware", "transports", "examples", "tests", "benchmarks")]
    files = {path: _words(path) for top in tops for path in top.rglob("*.py")}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    docs = set().union(*map(_words, pages))
    shown = {module for page in pages for module in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}
    users: dict[str, int] = {}
    for words in files.values():
        for word in words:
            users[word] = users.get(word, 0) + 1
    idle = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if "tests" not in path.relative_to(ROOT).parts[:1]
        for name in _listed(path)
        if users[name] < 2
        and name not in docs
        and ".".join(path.relative_to(ROOT).with_suffix("").parts) not in shown  # the page has all that it lists
    ]
    assert not idle


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_class_and_function_has_a_docstring(module: str) -> None:
    """Of its own, not the one that a dataclass writes."""
    home = importlib.import_module(module)
    for name in home.__all__:
        found = getattr(home, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert found.__doc__, name
            assert not found.__doc__.startswith(f"{name}("), name


def test_the_surface_is_small() -> None:
    """About fifty names; what only authors of layers and transports need is elsewhere."""
    assert len(asyncdp.__all__) <= 56


MOVED = [(name, home) for home, names in asyncdp._MOVED.items() for name in names]


@pytest.mark.parametrize(("name", "home"), MOVED, ids=[name for name, _ in MOVED])
def test_a_name_that_left_is_found_with_a_warning(name: str, home: str) -> None:
    """It is the same object, and the warning says where it is now."""
    with pytest.warns(DeprecationWarning, match=rf"asyncdp\.{name} is asyncdp\.{home}\.{name} now") as caught:
        found = getattr(asyncdp, name)
    assert found is getattr(importlib.import_module(f"asyncdp.{home}"), name)
    assert Path(caught[0].filename) == Path(__file__)
    assert name not in asyncdp.__all__


@pytest.mark.parametrize("module", ["asyncdp", "asyncdp.errors"])
def test_the_error_that_nothing_raised_is_found_with_a_warning(module: str) -> None:
    """Code that names it in an except clause goes on."""
    with pytest.warns(DeprecationWarning, match="nothing raises it"):
        kind = importlib.import_module(module).PortQuarantined
    assert issubclass(kind, asyncdp.DataPlaneUnavailable)
    assert "PortQuarantined" not in sys.modules[module].__all__
