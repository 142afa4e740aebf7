"""URLs as they may be shown: without the password that they may hold."""

from __future__ import annotations

import re

__all__ = ["without_password"]


def without_password(url: str) -> str:
    """Return a URL as it may be shown, also one whose password is not escaped."""
    if "//" not in url:
        return "***@" + url.rpartition("@")[2] if "@" in url else url
    shown = re.sub(r"//(?:([^:@/?#]*)(:.*)?|.*)@", lambda found: _shown_user(found[1], found[2]), url, flags=re.DOTALL)
    return re.sub(r"(password=)[^&]*", r"\1***", shown)


def _shown_user(user: str | None, password: str | None) -> str:
    if user is None:
        return "//***@"
    return f"//{user}:***@" if password else f"//{user}@"
