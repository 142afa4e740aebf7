"""What a partition fixed about one field.

TransferQueue's controller gets this file by value, where asyncdp may be missing: nothing of asyncdp is imported here
but where an error is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["FieldSpec"]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """What a partition fixed about one field.

    Attributes:
        kind: ``"tensor"``, ``"object"``, ``"enum"``, or ``""`` while nothing was written.
        dtype: Of a tensor field.
        shape: Shape of one row; None stands for the dimension in which rows differ. Rows that were all equal so far do
            not say which that is, also where they came as a nested tensor.
        nested: Whether a nested tensor was ever put: then it always comes back as torch.jagged.
        enum: Vocabulary of an enum field; values travel as indices into it.
    """

    kind: str = ""
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] = ()
    nested: bool = False
    enum: tuple[str, ...] = ()

    @property
    def ragged_dim(self) -> int:
        """The dimension of a row in which rows differ (0 where none does yet)."""
        return self.shape.index(None) if None in self.shape else 0

    def merge(self, new: FieldSpec, name: str) -> FieldSpec:
        """Return the spec after a put of ``new``.

        Raises:
            DataPlaneBadRequest: Kind, dtype or rank differ, or rows would differ in two dimensions.
        """
        if self == new or not new.kind:
            return self
        if not self.kind:
            return replace(new, enum=self.enum)
        if self.kind != new.kind:
            msg = f"field {name!r} holds {self.describe()}, not {new.describe()}"
            raise self._error(msg, name)
        if self.kind != "tensor":
            return self
        if self.dtype != new.dtype or len(self.shape) != len(new.shape):
            what = "dtype" if self.dtype != new.dtype else "rank"
            msg = f"field {name!r} holds {self.describe()}; a put of {new.describe()} would change its {what}"
            raise self._error(msg, name)
        shape = tuple(a if a == b else None for a, b in zip(self.shape, new.shape, strict=True))
        if shape.count(None) > 1:
            msg = (
                f"field {name!r} holds {self.describe()}; with {new.describe()} its rows would differ in two dimensions"
            )
            raise self._error(msg, name)
        return replace(self, shape=shape, nested=self.nested or new.nested)

    def _error(self, message: str, name: str) -> Exception:
        from asyncdp.errors import DataPlaneBadRequest

        return DataPlaneBadRequest(message, field=name)

    def describe(self) -> str:
        """Text of the type, such as ``float32[4, *]``."""
        if self.kind == "tensor":
            dims = ", ".join("*" if d is None else str(d) for d in self.shape)
            return f"{str(self.dtype).removeprefix('torch.')}[{dims}]"
        return f"enum({', '.join(self.enum)})" if self.kind == "enum" else self.kind
