"""Rows in memory: what the author of a transport needs to read and write payloads.

A :class:`Block` holds n rows in columnar form, with one :class:`Column` per field: :class:`Dense` for rows of one
shape, :class:`Ragged` for rows that differ in one dimension, :class:`Objects` for values that are no tensors, which an
:class:`ObjectCodec` encodes. A :class:`FieldSpec` is what a partition has fixed about a field. :func:`assemble` joins
the blocks of many reads. Each module is loaded when one of its names is first used, since slot hosts import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .block import Block as Block
    from .block import assemble as assemble
    from .column import Column as Column
    from .column import Dense as Dense
    from .column import Objects as Objects
    from .column import Ragged as Ragged
    from .column import schema_hash as schema_hash
    from .field_spec import FieldSpec as FieldSpec
    from .objects import PICKLE as PICKLE
    from .objects import ObjectCodec as ObjectCodec
    from .objects import PickleCodec as PickleCodec
    from .pack import field_names as field_names

_HOMES: Final = {
    "PICKLE": "objects",
    "Block": "block",
    "Column": "column",
    "Dense": "column",
    "FieldSpec": "field_spec",
    "ObjectCodec": "objects",
    "Objects": "column",
    "PickleCodec": "objects",
    "Ragged": "column",
    "assemble": "block",
    "field_names": "pack",
    "schema_hash": "column",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    """Load the module of a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
