"""Files that a command is told to write."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import typer

from asyncdp.process.private_files import check_path

__all__ = ["can_be_kept_private", "can_be_plotted", "can_be_written"]


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


def can_be_plotted(file: Path | None) -> Path | None:
    """Check also that what draws plots is installed."""
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        msg = "matplotlib is not installed; plots need: pip install 'asyncdp[plot]'"
        raise typer.BadParameter(msg)
    return can_be_written(file)


def can_be_kept_private(file: Path | None) -> Path | None:
    """Check also that no other user can replace the file, which is to hold a password."""
    if can_be_written(file) is not None and file is not None:
        try:
            check_path(file.parent)
        except OSError as err:
            raise typer.BadParameter(str(err)) from err
    return file
