"""The transport of docs/writing-a-transport.md is the one that is tested here, against the whole contract."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from asyncdp import calls
from asyncdp.calls import slots, snapshots
from asyncdp.examples.folder_transport import ANSWERS, FolderTransport
from asyncdp.testing.contract import Contract, DataPlaneContract, Opener, Puts, by_config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "writing-a-transport.md").read_text()
CODE = (ROOT / "examples" / "folder_transport.py").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def strays(transport: FolderTransport) -> Callable[[], dict[str, int]]:
    """Return a function that counts the files of a plane to which its directory does not refer."""

    def count() -> dict[str, int]:
        folder, plane = Path(transport.folder), transport.planes.get(transport.folder)
        left = 0 if plane is None else len({int(path.name) for path in folder.iterdir()} ^ plane.files.keys())
        return {"files": left} if left else {}

    return count


class InFolder(Contract):
    """Planes of the page's transport."""

    @pytest.fixture
    def open_plane(self) -> Opener:
        """Open each plane in a folder of its own."""
        return by_config(FolderTransport, leftovers=strays, impl="folder")


class TestPuts(InFolder, Puts):
    """The theme of puts, on asyncio: the slice of the contract that make test runs."""

    loops = ("asyncio",)


class TestFolder(InFolder, DataPlaneContract):
    """The whole contract, on asyncio and trio."""

    pytestmark: ClassVar = [*Contract.pytestmark, pytest.mark.slow]


def test_the_page_shows_the_file_that_is_tested() -> None:
    """Its first block is the file; without imports and blank lines it is of at most 150 lines."""
    assert BLOCKS[0] == CODE
    assert len([line for line in CODE.splitlines() if line and not line.startswith(("from ", "import "))]) <= 150


def test_the_file_imports_what_the_page_lists() -> None:
    """What a transport's author imports is public: the page's table of modules has all that the file imports from."""
    listed = set(re.findall(r"^\| `(asyncdp[\w.]*)` \|", TEXT, re.MULTILINE))
    assert "asyncdp.calls" in listed
    directory = "asyncdp.transports.directory"
    for module in re.findall(r"^from (asyncdp[\w.]*) import", CODE, re.MULTILINE):
        assert (directory if module.startswith(directory) else module) in listed


def test_the_page_shows_how_the_contract_is_run_on_it() -> None:
    """Its second block is the fixture of this file, without the count of stray files."""
    names: dict[str, type] = {}
    exec(BLOCKS[1], names)
    assert issubclass(names["TestFolder"], DataPlaneContract)
    assert 'by_config(FolderTransport, impl="folder")' in BLOCKS[1]


def test_every_call_of_the_page_exists() -> None:
    """What its table names are calls, and the transport serves those that are not needed "only" for something."""
    table = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|$", TEXT, re.MULTILINE)
    assert len(table) > 10
    served = (*ANSWERS, *FolderTransport._methods)
    for names, needed in table:
        for name in re.findall(r"`(\w+)`", names):
            kind = next(getattr(module, name) for module in (calls, slots, snapshots) if hasattr(module, name))
            assert issubclass(kind, served) or needed.startswith("only"), name
