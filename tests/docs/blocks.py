"""The fenced blocks of all pages, and who runs them: ``python -m tests.docs.blocks FOLDER`` writes programs as files.

A page's Python blocks are one program, which tests/docs/test_pages.py runs and ``make types`` checks, unless the page
has tests of its own, which run them otherwise.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: All pages, by their path in the repository.
PAGES = sorted(["README.md", *(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))])
#: Pages with tests of their own for their Python blocks.
OWN_TESTS = {
    "README.md": "test_readme.py",
    "docs/operations.md": "test_operations.py",
    "docs/testing.md": "test_testing.py",
    "docs/transfer_queue.md": "test_transfer_queue.py",
    "docs/ucxx.md": "test_ucxx.py",
    "docs/writing-a-transport.md": "test_writing_a_transport.py",
}
#: Pages whose program is not written for a type checker: the config is NeMo-RL's, as people have it.
UNTYPED = {"docs/config.md", "docs/nemo_rl.md"}


def blocks(page: str) -> list[tuple[str, str]]:
    """Return language and text of each fenced block of a page."""
    return FENCE.findall((ROOT / page).read_text())


def program(page: str) -> str:
    """Return the Python blocks of a page, in order, as one program."""
    return "\n".join(code for language, code in blocks(page) if language == "python")


def programs() -> list[str]:
    """Return the pages whose Python blocks are a program."""
    return [page for page in PAGES if page not in OWN_TESTS and program(page)]


def write(folder: Path) -> None:
    """Write the programs that are to be type checked as modules of a package."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    (folder / "__init__.py").write_text('"""The programs of the pages; written by tests/docs/blocks.py."""\n')
    for page in set(programs()) - UNTYPED:
        name = re.sub(r"\W", "_", page.removeprefix("docs/").removesuffix(".md"))
        (folder / f"{name}.py").write_text(f'"""The program of {page}."""\n\n{program(page)}')


if __name__ == "__main__":
    write(Path(sys.argv[1]))
