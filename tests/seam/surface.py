"""Writes down the public surface of the seam. Run it to accept a change: ``python tests/seam/surface.py``."""

import dataclasses
import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

#: What users, authors of layers, and authors of transports import from, but for errors and metas.
MODULES = (
    "asyncdp",
    "asyncdp.calls",
    "asyncdp.calls.slots",
    "asyncdp.calls.answers",
    "asyncdp.compose.waits",
    "asyncdp.rows",
)
FILE = Path(__file__).with_name("surface.txt")
#: Dunder methods that users call by syntax.
SPOKEN = {"__init__", "__call__", "__aenter__", "__aexit__", "__len__", "__str__", "__reduce__"}


def _signature(function: Any) -> str:
    """Return the signature as it is written, without the defaults' addresses."""
    return re.sub(
        r"frozenset\(\{.*?\}\)", "...", str(inspect.signature(function)).replace("'", "")
    )  # in no fixed order


def _members(kind: type) -> list[str]:
    lines = []
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_") and name not in SPOKEN:
            continue
        if name == "__init__" and (dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False)):
            continue  # its fields say it all; a protocol is never made
        plain = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if isinstance(plain, property):
            lines.append(f"    property {name} -> {plain.fget.__annotations__.get('return', '')}")
        elif inspect.isfunction(plain):
            prefix = "async def" if inspect.iscoroutinefunction(plain) else "def"
            lines.append(f"    {prefix} {name}{_signature(plain)}")
    return lines


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is dataclasses.MISSING else " = ..."


def _class(name: str, kind: type) -> list[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    lines = [f"class {name}({bases})" if bases else f"class {name}"]
    if issubclass(kind, Enum):
        return lines + [f"    {member.name} = {member.value!r}" for member in kind]
    if dataclasses.is_dataclass(kind):
        lines.extend(f"    {field.name}: {field.type}{_default(field)}" for field in dataclasses.fields(kind))
    shown = [attribute for attribute in ("resend", "mutates", "_starts") if attribute in vars(kind)]
    lines.extend(f"    [{attribute.strip('_')}] {vars(kind)[attribute]}" for attribute in shown)
    return lines + _members(kind)


def surface() -> str:
    """Return the surface as text, a paragraph per public name."""
    paragraphs = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        paragraphs.append([f"# {module_name}"])
        for name in sorted(module.__all__):
            member = getattr(module, name)
            if inspect.isclass(member):
                paragraphs.append(_class(name, member))
            elif inspect.isfunction(member):
                prefix = "async def" if inspect.iscoroutinefunction(member) else "def"
                paragraphs.append([f"{prefix} {name}{_signature(member)}"])
            else:
                paragraphs.append([f"{name}"])
    return re.sub(r" at 0x[0-9a-f]+", "", "\n\n".join("\n".join(lines) for lines in paragraphs)) + "\n"


if __name__ == "__main__":
    FILE.write_text(surface())
