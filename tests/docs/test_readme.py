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


def test_every_block_of_the_readme_is_run_or_is_a_command() -> None:
    """The one Python block is run above; the commands are targets of the Makefile, or installs by extra."""
    languages = [language for language, _ in _blocks("README.md")]
    assert languages.count("python") == 1
    targets = re.findall(r"^make ([\w-]+)", "\n".join(code for _, code in _blocks("README.md")), re.MULTILINE)
    assert targets
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)
    extras = re.findall(r"asyncdp\[([\w,]+)\]", (ROOT / "README.md").read_text())
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{name} = \[", pyproject, re.MULTILINE) for name in ",".join(extras).split(","))


def test_the_layer_of_the_docs_is_of_ten_lines() -> None:
    """The layer of docs/tutorials/own_layer.md is as short as docs/layers.md says; test_pages.py runs it."""
    code = next(code for language, code in _blocks("docs/tutorials/own_layer.md") if "class CountPuts" in code)
    layer = code[code.index("class CountPuts") : code.index("client = ")]
    assert len([line for line in layer.splitlines() if line.strip()]) <= 10


MAPS = ["README.md", "CONTRIBUTING.md", "tests/README.md", "docs/architecture.md", "docs/writing-a-transport.md"]


@pytest.fixture(scope="module")
def files() -> list[str]:
    """All files of the repository and the folders that hold them, which end in a slash."""
    found = set()
    for top in ("asyncdp", "middleware", "transports", "examples", "tests", "benchmarks", "docs", ".ci"):
        found |= {path.relative_to(ROOT).as_posix() for path in (ROOT / top).rglob("*") if path.is_file()}
    found |= {path.name for path in ROOT.iterdir() if path.is_file()}
    folders = {f"{parent.as_posix()}/" for path in found for parent in Path(path).parents}
    return [f"/{path}" for path in found | folders]


@pytest.mark.parametrize("document", MAPS)
def test_paths_and_names_in_the_maps_exist(document: str, files: list[str]) -> None:
    """Each file and folder that a map of the repository names is there, and each class is defined in the package."""
    text = (ROOT / document).read_text()
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    paths = set(re.findall(r"(?<![\w/.:-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|lua|txt))\b", text))
    paths |= set(re.findall(r"`((?:[\w.-]+/)+)`", text))
    assert len(paths) > 5
    assert [
        path for path in sorted(paths) if not any(file.endswith(f"/{path.removeprefix('../')}") for file in files)
    ] == []
    source = "\n".join(
        (ROOT / file[1:]).read_text() for file in files if file.endswith(".py") and "/tests/" not in file
    )
    names = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", text))
    assert [name for name in sorted(names) if not re.search(rf"class {name}\b|^{name}\b", source, re.MULTILINE)] == []


@pytest.mark.parametrize(
    "document",
    ["CONTRIBUTING.md", "tests/README.md"],
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    """A relative link names a file that is there."""
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / document).parent / target).exists(), target
