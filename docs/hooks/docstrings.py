"""Extension of griffe: docstrings as Markdown, without the roles and literal blocks of reStructuredText."""

from __future__ import annotations

import re

import griffe

#: A role, whose last name is shown.
ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


class PlainDocstrings(griffe.Extension):
    """Shows roles as code."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^::\n", "", text).replace("::\n", ":\n")
