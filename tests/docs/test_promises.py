"""PROMISES.md defines every promise and case that docstrings of tests name, and no other."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = files("asyncdp").joinpath("testing", "PROMISES.md").read_text()
DEFINITION = re.compile(r"^- \*\*(\w+)\*\* (.*(?:\n  .*)*)", re.MULTILINE)
CASE = re.compile(r"\b([ACPRSTUX])(\d{1,2}[a-z]?)\b(?: to \1(\d{1,2})\b)?")
PROMISE = re.compile(r"\bpromises? (\d+[a-z]?(?:(?:, | and | to )\d+[a-z]?)*)", re.IGNORECASE)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
DEFINED = [name for name, _ in DEFINITION.findall(TEXT)]


def ids_in(text: str) -> Iterator[str]:
    """Yield the ids that a text names; "S5 to S8" names four."""
    for letter, first, last in CASE.findall(text):
        yield from (f"{letter}{at}" for at in range(int(first), int(last) + 1)) if last else (letter + first,)
    for numbers in PROMISE.findall(text):
        yield from re.findall(r"\d+[a-z]?", numbers)


def documented(node: ast.AST) -> Iterator[Documented]:
    """Yield a module and its classes and functions, methods included."""
    if isinstance(node, Documented):
        yield node
        for child in node.body:
            yield from documented(child)


@cache
def named() -> dict[str, str]:
    """Return one place in which each id is named, over the docstrings of the tests and of the test kit."""
    places: dict[str, str] = {}
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "asyncdp" / "testing").rglob("*.py")]):
        text = path.read_text()
        if CASE.search(text) or PROMISE.search(text):
            for node in documented(ast.parse(text)):
                where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                places.update((name, where) for name in ids_in(ast.get_docstring(node) or ""))
    return places


def test_every_id_that_a_test_names_is_defined_once() -> None:
    """The page has one definition of each, with a whole sentence."""
    assert len(DEFINED) == len(set(DEFINED))
    assert all(text.rstrip().endswith(".") for _, text in DEFINITION.findall(TEXT))
    assert {name: where for name, where in named().items() if name not in DEFINED} == {}


def test_every_id_that_is_defined_is_named_by_a_test_or_says_why_not() -> None:
    """The words "No test", with the reason, stand at exactly those that no test names."""
    without = {name for name, text in DEFINITION.findall(TEXT) if "No test: " in text}
    assert set(DEFINED) - named().keys() == without


def test_the_forms_in_which_docstrings_name_ids_are_understood() -> None:
    """Lists and ranges of both kinds."""
    assert list(ids_in("S5 to S7, R4b (P12): promises 3a and 10b")) == ["S5", "S6", "S7", "R4b", "P12", "3a", "10b"]
