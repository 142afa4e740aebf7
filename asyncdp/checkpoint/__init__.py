"""Checkpoints of a plane: :func:`save`, :func:`restore`, :func:`verify`, :func:`contents`. See docs/checkpoints.md."""

from .files import CheckpointError, Summary, contents, verify
from .restoring import restore
from .saving import save

__all__ = ["CheckpointError", "Summary", "contents", "restore", "save", "verify"]
