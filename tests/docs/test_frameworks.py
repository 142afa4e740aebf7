"""The pages for users of NeMo-RL, verl and cosmos-rl: their settings are those there are."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from asyncdp.config import NemoSettings

DOCS = Path(__file__).parents[2] / "docs"


def test_every_setting_of_nemo_is_listed_with_its_default() -> None:
    """In the table of docs/nemo_rl.md, once, and nothing else is."""
    rows = re.findall(r"^\| `(\w+)` \| (True|False) \|", (DOCS / "nemo_rl.md").read_text(), re.MULTILINE)
    assert dict(rows) == {one.name: str(one.default) for one in msgspec.structs.fields(NemoSettings)}
    assert len(rows) == len(dict(rows))
