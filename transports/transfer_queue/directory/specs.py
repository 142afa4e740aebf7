"""Field specs for the directory, which runs where asyncdp need not be installed."""

from __future__ import annotations

from typing import Any

from asyncdp.rows.field_spec import FieldSpec
from asyncdp.transports.directory.partition import Refused

__all__ = ["Spec"]


class Spec(FieldSpec):
    """A FieldSpec that holds the dtype by name and raises errors as a directory does."""

    __slots__ = ()

    def _error(self, message: str, name: str) -> Exception:
        return Refused("DataPlaneBadRequest", message, field=name)

    def to_wire(self) -> tuple[Any, ...]:
        """Return a plain tuple of its values; ``Spec(*wire)`` restores it."""
        return (self.kind, self.dtype or "", self.shape, self.nested, self.enum)
