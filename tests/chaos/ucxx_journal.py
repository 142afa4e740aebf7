"""What a process did, line by line, in a file that a SIGKILL does not take away."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Journal", "entries"]


class Journal:
    """Appends entries; each is in the kernel's hands when :meth:`note` returns.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        """Open it."""
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, **told: Any) -> None:
        """Write one entry."""
        os.write(self._fd, (json.dumps({"what": what, "at": time.time(), **told}) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def entries(path: Path) -> list[dict[str, Any]]:
    """Read what was written down; a line that was cut off by the end of its process does not count."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
