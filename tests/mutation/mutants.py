"""Mutants of a file: its source with one small fault each, made by the operators of mutmut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from mutmut.mutation.file_mutation import create_mutations

__all__ = ["Mutant", "mutants_of"]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: Where.
        line: Of the fault, in the original.
        before, after: The lines that differ, without their indentation.
        source: The whole file with the fault.
    """

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Return the mutants of what is within functions, but for the texts of errors: those are for people to read."""
    code = (root / file).read_text()
    module, mutations, _, _ = create_mutations(file, code)
    texts = _messages_of_errors(module)
    found: dict[tuple[int, str, str], Mutant] = {}
    for mutation in mutations:
        if mutation.contained_by_top_level_function is None or mutation.original_node in texts:
            continue
        source = module.deep_replace(mutation.original_node, mutation.mutated_node).code
        old, new = code.splitlines(), source.splitlines()
        first = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
        if first is None:
            continue
        last = next(at for at, (a, b) in enumerate(zip(reversed(old), reversed(new), strict=False)) if a != b)
        before = " ".join(line.strip() for line in old[first : len(old) - last])
        after = " ".join(line.strip() for line in new[first : len(new) - last])
        found.setdefault((first, before, after), Mutant(file, first + 1, before, after, source))
    return list(found.values())


def _messages_of_errors(module: cst.Module) -> set[cst.CSTNode]:
    texts: set[cst.CSTNode] = set()
    raised: set[str] = set()

    class Raises(cst.CSTVisitor):
        def visit_Raise(self, node: cst.Raise) -> None:  # noqa: N802 - libcst's name
            class Messages(cst.CSTVisitor):
                def on_visit(self, node: cst.CSTNode) -> bool:
                    if isinstance(node, cst.BaseString | cst.Arg):
                        texts.add(node)
                    if isinstance(node, cst.Arg) and isinstance(node.value, cst.Name):
                        raised.add(node.value.value)
                    return True

            node.visit(Messages())
            for inner in _calls(node):
                texts.add(inner)

    class Assigned(cst.CSTVisitor):
        def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 - libcst's name
            target = node.targets[0].target
            if isinstance(target, cst.Name) and target.value in raised and isinstance(node.value, cst.BaseString):
                texts.update((node, node.value))

    module.visit(Raises())
    module.visit(Assigned())
    return texts


def _calls(node: cst.Raise) -> list[cst.CSTNode]:
    return [node.exc] if isinstance(node.exc, cst.Call) else []
