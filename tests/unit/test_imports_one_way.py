"""Imports go one way, and layers take time and chance as arguments."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What puts stacks together.
KNOWS_ALL = {"factory.py", "layering.py", "__init__.py"}
PUT_TOGETHER = ("asyncdp.factory", "asyncdp.layering")
#: Folders of the core.
CORE_FOLDERS = ("batching", "calls", "compose", "metrics", "process", "rows", "settings")


def _imports(file: Path, *, typing_too: bool = False) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not typing_too:
            skipped.update(ast.walk(node))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield _absolute(file, node)


def _absolute(file: Path, node: ast.ImportFrom) -> str:
    """Return the name of the module that an import names, which may be relative to the file's folder."""
    if not node.level:
        return node.module or ""
    folder = file.relative_to(ROOT).parts[: -node.level]
    parts = folder if folder[0] == "asyncdp" else ("asyncdp", *folder)
    return ".".join([*parts, *([node.module] if node.module else [])])


def _files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


CORE = [
    *(f for f in sorted((ROOT / "asyncdp").glob("*.py")) if f.name not in KNOWS_ALL),
    *(f for folder in CORE_FOLDERS for f in _files(f"asyncdp/{folder}")),
]


@pytest.mark.parametrize("file", CORE, ids=lambda f: str(f.relative_to(ROOT / "asyncdp")))
def test_the_core_knows_neither_layers_nor_transports(file: Path) -> None:
    """The core imports nothing of middleware, transports or testing."""
    for name in _imports(file):
        assert not name.startswith(("asyncdp.middleware", "asyncdp.transports", "asyncdp.testing")), name


@pytest.mark.parametrize("file", _files("middleware"), ids=lambda f: str(f.relative_to(ROOT / "middleware")))
def test_layers_know_no_transport_and_take_time_and_chance_as_arguments(file: Path) -> None:
    """Middleware imports no transport, no asyncio, no time, no random (but for types)."""
    for name in _imports(file):
        assert not name.startswith(("asyncdp.transports", "asyncdp.testing", *PUT_TOGETHER)), name
        assert name.split(".")[0] not in {"asyncio", "time", "random", "trio"}, name


@pytest.mark.parametrize("file", _files("transports"), ids=lambda f: str(f.relative_to(ROOT / "transports")))
def test_transports_know_no_layer(file: Path) -> None:
    """Transports import the core only."""
    for name in _imports(file):
        assert not name.startswith(("asyncdp.middleware", "asyncdp.testing", *PUT_TOGETHER)), name


@pytest.mark.parametrize("file", _files("transports/directory"), ids=lambda f: f.name)
def test_the_directory_needs_the_standard_library_only(file: Path) -> None:
    """It is sent by value where asyncdp may be missing; of itself it imports names: modules go with all they hold."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert _absolute(file, node) != "asyncdp.transports.directory", [name.name for name in node.names]
    for name in _imports(file, typing_too=True):
        own = name.startswith("asyncdp.transports.directory.")
        assert own or name.split(".")[0] in sys.stdlib_module_names, name


def test_the_product_does_not_read_what_lies_beside_the_repository() -> None:
    """No product file names the folder that tests may read."""
    for folder in ("asyncdp", "middleware", "transports", "examples"):
        for file in _files(folder):
            assert "../shared" not in file.read_text(), file
