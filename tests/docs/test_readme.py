"""What the README shows runs as shown."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(document: str) -> list[tuple[str, str]]:
    return FENCE.findall((ROOT / document).read_text())


def _run(code: str, tmp_path: Path) -> str:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    """The twenty lines run, and print the block below them."""
    blocks = _blocks("README.md")
    at = next(i for i, (language, code) in enumerate(blocks) if language == "python" and "asyncio.run" in code)
    assert len([line for line in blocks[at][1].splitlines() if line.strip()]) <= 20
    assert _run(blocks[at][1], tmp_path) == blocks[at + 1][1]


@pytest.mark.slow
def test_the_layer_of_the_readme_counts(tmp_path: Path) -> None:
    """The ten-line layer works in a stack."""
    code = next(code for language, code in _blocks("README.md") if "class CountPuts" in code)
    layer = code[code.index("class CountPuts") : code.index("client = ")]
    assert len([line for line in layer.splitlines() if line.strip()]) <= 10
    use = """
import anyio, torch

async def main():
    async with client:
        await client.register_partition("p", ["x"], 2, ["t"])
        await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})
        counter = next(layer for layer in asyncdp.layers_of(client) if isinstance(layer, CountPuts))
        print(counter.puts)

import asyncdp
anyio.run(main)
"""
    assert _run(code + use, tmp_path) == "2\n"


@pytest.mark.slow
def test_the_fault_plan_of_the_readme_runs(tmp_path: Path) -> None:
    """The example with faults runs as shown."""
    code = next(code for language, code in _blocks("README.md") if "FaultPlan(seed=7)" in code)
    assert _run(code, tmp_path) == ""


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/layers.md", "docs/architecture.md", "docs/config.md"]
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    """A relative link names a file that is there."""
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / document).parent / target).exists(), target
