"""docs/config.md lists every key of a config with its default."""

import re
from pathlib import Path

from asyncdp import DataPlaneConfig
from asyncdp.config import Config

TEXT = (Path(__file__).parents[2] / "docs" / "config.md").read_text()


def test_every_key_is_listed_with_its_default() -> None:
    """In the table, once, and nothing else is."""
    rows = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
    listed = {key: row[1].strip("` ") for row in rows for key in re.findall(r"`(\w+)`", row[0])}
    assert listed.keys() == DataPlaneConfig.__annotations__.keys()
    defaults = dict(zip(reversed(Config.__struct_fields__), reversed(Config.__struct_defaults__), strict=False))
    for key, default in defaults.items():
        if isinstance(default, (bool, int, float, str)):
            assert listed[key] == f"{default:g}" if type(default) is float else str(default)
