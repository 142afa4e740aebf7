"""What a partition fixed about its fields, where asyncdp need not be installed."""

from __future__ import annotations

from typing import Any

from asyncdp.rows.field_spec import FieldSpec
from asyncdp.transports.directory.partition import Refused

__all__ = ["Spec"]


class Spec(FieldSpec):
    """The same with the dtype by name, and errors as a directory raises them."""

    __slots__ = ()

    def _error(self, message: str, name: str) -> Exception:
        return Refused("DataPlaneBadRequest", message, field=name)

    def to_wire(self) -> tuple[Any, ...]:
        """Return it as it travels; ``Spec(*wire)`` reads it."""
        return (self.kind, self.dtype or "", self.shape, self.nested, self.enum)
