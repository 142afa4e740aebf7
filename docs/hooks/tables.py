"""Tables of the reference, read off the code: configs, settings of layers, commands."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import griffe
import msgspec
from docstrings import ROLE

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes per unit.
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "multiple of"}
NAMES = {"Int": "int", "Float": "float", "Bool": "bool", "Str": "str", "Dict": "mapping", "List": "list"}


def table(what: str) -> str:
    """Return a table as Markdown: ``"config"``, ``"layers"``, ``"cli"``, or the path of a Struct."""
    makers = {"config": config, "layers": layers, "cli": commands}
    return makers[what]() if what in makers else settings(what)


def rows(body: Iterator[tuple[str, str, str, str]]) -> str:
    """Return a table of keys, each with its type, default and sentence; a bar within a cell does not end it."""
    lines = [("key", "default", "is"), ("---",) * 3]
    lines += [(f"`{key}`<br>{kind}", default, sentence) for key, kind, default, sentence in body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def described(kind: type) -> dict[str, str]:
    """Return the sentences about attributes or arguments in the docstring of a class, as Markdown."""
    found = {}
    for section in griffe.Docstring(inspect.cleandoc(kind.__doc__ or "")).parse("google", warnings=False):
        if section.kind in (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters):
            found |= {one.name: one.description for one in section.value}
    return {name: " ".join(ROLE.sub(r"`\1`", text).split()) for name, text in found.items()}


def settings(path: str) -> str:
    """Return the keys of a Struct: type, default, and the sentence of its docstring."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    sentences = described(kind)
    fields = msgspec.inspect.type_info(kind).fields
    return rows((one.name, kind_of(one), value_of(one), sentences[one.name]) for one in fields)


def config() -> str:
    """Return the keys of a config: those of ``Config``, with the sentences of ``DataPlaneConfig``."""
    from asyncdp.config import Config, DataPlaneConfig

    sentences = described(DataPlaneConfig)
    fields = {one.name: one for one in msgspec.inspect.type_info(Config).fields}

    def cells(name: str) -> tuple[str, str]:
        if name not in fields:
            return "mapping", "none"
        required_here = name not in ("enabled", "impl") and fields[name].required
        return kind_of(fields[name]), "by impl" if required_here else value_of(fields[name])

    return rows((name, *cells(name), sentences[name]) for name in DataPlaneConfig.__annotations__)


def layers() -> str:
    """Return the settings under ``layers:``."""
    from asyncdp.layering import DEFAULT_LAYERS
    from asyncdp.middleware.policy.budget import RetryBudget

    def body() -> Iterator[tuple[str, str, str, str]]:
        for layer, kind in {**DEFAULT_LAYERS, "retry_budget": RetryBudget}.items():
            sentences = described(kind)
            for one in inspect.signature(kind).parameters.values():
                if one.kind is one.KEYWORD_ONLY:
                    default = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
                    yield f"{layer}.{one.name}", str(one.annotation), default, sentences[one.name]

    return rows(body())


def kind_of(field: Any, kind: Any = None) -> str:
    """Return the type of a field and its limits in words."""
    info, kind = msgspec.inspect, kind or field.type
    if isinstance(kind, info.UnionType):
        return " or ".join(kind_of(field, one) for one in kind.types if not isinstance(one, info.NoneType))
    if isinstance(kind, info.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, info.StructType):
        return "mapping"
    text = NAMES.get(type(kind).__name__.removesuffix("Type"), "any")
    limits = ((said, getattr(kind, name, None)) for name, said in LIMITS.items())
    return ", ".join([text, *(f"{said} {size_of(field.name, limit)}" for said, limit in limits if limit is not None)])


def size_of(name: str, number: float) -> str:
    """Return a number as text; one of bytes in binary units where it is a multiple of one."""
    if name.endswith("bytes"):
        for unit, size in UNITS.items():
            if number >= size and number % size == 0:
                return f"{number // size} {unit}"
    return f"{number:g}" if isinstance(number, float) else f"{number:,}"


def value_of(field: Any) -> str:
    """Return the default of a field as text."""
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return size_of(field.name, value)
    return f"`{value}`" if value != "" else '`""`'


def commands() -> str:
    """Return the commands with what ``--help`` says."""
    import typer

    from asyncdp.cli.app import app

    def each(command: Any, name: str) -> Iterator[str]:
        nested = getattr(command, "commands", {})
        context = typer.Context(command, info_name=name, max_content_width=90, terminal_width=90)
        if nested and name != "asyncdp":
            yield f"## {name}\n\n{command.help}\n"
        elif not nested:
            words = " ".join(inspect.cleandoc(command.help).partition("\n\n")[0].split())
            level = "##" if name.count(" ") == 1 else "###"
            yield f"{level} {name}\n\n{words}\n\n```text\n{command.get_help(context).rstrip()}\n```\n"
        for part, one in sorted(nested.items()):
            yield from each(one, f"{name} {part}")

    return "\n".join(each(typer.main.get_command(app), "asyncdp"))
