"""Errors of settings say a user's names for them, not those of what is made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["check_keys", "named"]

#: ``layers.slot_retry.max_attempts``: no key lies deeper; what does is a value, its owner's to check.
DEPTH = 3


@contextmanager
def named(**settings: str) -> Iterator[None]:
    """Put a user's names into the ValueError of what is made of settings: ``named(base_s="quarantine_s")``."""
    try:
        yield
    except ValueError as err:
        names = re.compile(rf"\b({'|'.join(settings)})\b")
        raise ValueError(names.sub(lambda found: settings[found[1]], str(err))) from err


def check_keys(config: Mapping[Any, Any], path: str = "", depth: int = DEPTH) -> None:
    """Check what msgspec has no name for: keys that are no strings, and layers without a mapping.

    Raises:
        ValueError: The message begins with the key.
    """
    for key, value in config.items():
        where = f"{path}{key if isinstance(key, str) else repr(key)}"
        if not isinstance(key, str):
            msg = f"{where}: keys are strings, this one is of type {type(key).__name__}"
            raise ValueError(msg)  # noqa: TRY004 - config errors are ValueErrors
        if path == "layers." and not isinstance(value, Mapping):
            msg = f"{where}: must be a mapping of the layer's settings, not {value!r:.80}"
            raise ValueError(msg)
        if isinstance(value, Mapping) and depth > 1:
            check_keys(value, f"{where}.", depth - 1)
