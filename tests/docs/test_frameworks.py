"""The pages for users of NeMo-RL, verl and cosmos-rl: their code runs, their settings are those there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asyncdp.config import NemoSettings

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["nemo_rl.md", "verl.md", "cosmos_rl.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """Each block, in order, as one program; links lead somewhere."""
    text = (DOCS / page).read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(FENCE.findall(text)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (DOCS / target).exists(), target


def test_every_setting_of_nemo_is_listed_with_its_default() -> None:
    """In the table of docs/nemo_rl.md, once, and nothing else is."""
    rows = re.findall(r"^\| `(\w+)` \| (True|False) \|", (DOCS / "nemo_rl.md").read_text(), re.MULTILINE)
    assert dict(rows) == {one.name: str(one.default) for one in msgspec.structs.fields(NemoSettings)}
    assert len(rows) == len(dict(rows))
