"""The tables of docs/config.md, which are made from the code, have a sentence for every key."""

import re
import sys
from pathlib import Path

import pytest

from asyncdp import DataPlaneConfig
from asyncdp.factory import layer_settings
from asyncdp.settings.verb_arguments import _TYPED_TAGS

DOCS = Path(__file__).parents[2] / "docs"
TABLES = re.findall(r"^<!-- table: (.+) -->$", (DOCS / "config.md").read_text(), re.MULTILINE)


def rows(what: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the cells of a table by key, as the site's build makes it."""
    monkeypatch.syspath_prepend(str(DOCS / "hooks"))
    try:
        import tables  # type: ignore[import-not-found]

        lines = tables.table(what).splitlines()[2:]
    finally:
        sys.modules.pop("tables", None)
    found = {}
    for line in lines:
        key, default, sentence = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        name, kind = key.split("<br>")
        found[name.strip("`")] = [kind, default, sentence]
    return found


@pytest.mark.parametrize("what", TABLES)
def test_every_key_has_type_default_and_a_sentence(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each table that the page shows; a key that its docstring does not tell of fails the build."""
    pytest.importorskip("griffe", reason="needs the extra: pip install 'asyncdp[docs]'")
    found = rows(what, monkeypatch)
    for key, (kind, default, sentence) in found.items():
        assert kind not in ("", "any") or key in ("layers", "retry_budget"), key
        assert default, key
        assert sentence.endswith((".", ")")), key
    if what == "config":
        assert found.keys() == DataPlaneConfig.__annotations__.keys()
        assert found["call_timeout_s"][:2] == ["float, above 0", "60"]
    if what == "layers":
        assert found.keys() == {f"{layer}.{key}" for layer, keys in layer_settings().items() for key in keys}


def test_every_transport_has_its_table() -> None:
    """Also the settings of slot hosts and of the directory's client."""
    assert {what.rpartition(".")[2] for what in TABLES} == {
        "config",
        "layers",
        *("MemorySettings", "TransferQueueSettings", "UcxxSettings", "NemoSettings"),
        *("HostSettings", "DirectorySettings"),
    }


def test_every_reserved_tag_is_listed_with_its_type() -> None:
    """In the table of docs/reference/tags.md, and nothing else is."""
    listed = re.findall(r"^\| `(\w+)` \| ([\w ]+)", (DOCS / "reference" / "tags.md").read_text(), re.MULTILINE)
    assert {name: kinds.strip() for name, kinds in listed} == {
        name: " or ".join(kind.__name__ for kind in kinds) for name, kinds in _TYPED_TAGS.items()
    }
