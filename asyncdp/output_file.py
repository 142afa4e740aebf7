"""Files that a command is told to write."""

from __future__ import annotations

import os
from pathlib import Path

import typer

__all__ = ["can_be_written"]


def can_be_written(file: Path | None) -> Path | None:
    """Check where a file is to be written before the work whose result it holds."""
    if file is not None:
        if file.is_dir():
            msg = f"{file} is a folder"
            raise typer.BadParameter(msg)
        if not file.parent.is_dir():
            msg = f"there is no folder {file.parent}"
            raise typer.BadParameter(msg)
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            msg = f"{file} cannot be written"
            raise typer.BadParameter(msg)
    return file
