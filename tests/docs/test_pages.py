"""Every block of a page is run, or, where it would install, listen or kill, is at least a command that there is."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from tests.docs import blocks

ROOT = Path(__file__).parents[2]
#: These take longer than a second.
SLOW = {"docs/nemo_rl.md"}
LANGUAGES = {"", "bash", "console", "ini", "python", "text", "yaml"}
COMMANDS = [(page, code) for page in blocks.PAGES for language, code in blocks.blocks(page) if language == "bash"]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in blocks.programs()]
)
def test_the_program_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks, in order, as one program; what it prints is what the page says that it prints."""
    exec(compile(blocks.program(page), page, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    shown = [text for language, text in blocks.blocks(page) if language == "text"]
    assert not printed or printed in shown


def test_every_block_has_a_test() -> None:
    """A page that runs its blocks in tests of its own has them; nothing that looks like code is in no language."""
    for page, test in blocks.OWN_TESTS.items():
        assert blocks.program(page), page
        assert (ROOT / "tests" / "docs" / test).exists(), test
    for page in blocks.PAGES:
        for language, text in blocks.blocks(page):
            assert language in LANGUAGES, page
            code = re.search(r"^(import |from \w+ import |async def |asyncdp |pip install|make )", text, re.MULTILINE)
            assert language or code is None, (page, text)
        fenced = blocks.FENCE.sub("", (ROOT / page).read_text())
        assert not re.search(r"^    (import|from|async def|asyncdp|pip|make|python) ", fenced, re.MULTILINE), page


@pytest.mark.parametrize(("page", "code"), COMMANDS, ids=lambda value: value.partition("\n")[0][:60])
def test_a_command_is_one_that_there_is(page: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extras of pip, targets of make, modules of python, and commands of asyncdp with their options."""
    lines = [words for line in code.splitlines() if (words := shlex.split(line, comments=True))]
    assert lines, page
    for line in lines:
        words = line[1:] if line[0] == "export" else line
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words[0].partition("=")
            monkeypatch.setenv(name, value)
            words = words[1:]
        if words:
            KNOWN[words[0]](words[1:])


def _pip(words: list[str]) -> None:
    assert words[0] == "install"
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"^asyncdp\[(.*)\]$", "\n".join(words), re.MULTILINE):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), extra


def _make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        assert "=" in word or f"\n{word}:" in makefile, word


def _python(words: list[str]) -> None:
    assert words[0] == "-m"
    assert importlib.util.find_spec(words[1]) is not None, words


def _asyncdp(words: list[str]) -> None:
    import typer

    from asyncdp.cli.app import app

    command: object = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]  # type: ignore[attr-defined]
        words = words[1:]
    command.make_context("asyncdp", words)  # type: ignore[attr-defined] # it fails for what the command does not know


KNOWN = {"pip": _pip, "make": _make, "python": _python, "asyncdp": _asyncdp}


@pytest.mark.parametrize("page", blocks.PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """A relative link of a page names a file that is there; that anchors are there is looked at by the site's build."""
    text = blocks.FENCE.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
