"""FieldSpec: the type of a field, which the first put of a partition fixes.

This file is sent by value to TransferQueue's controller, where asyncdp may not be installed, so it imports asyncdp only
where it raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["FieldSpec"]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The type of one field, as a partition has fixed it.

    Attributes:
        kind: ``"tensor"``, ``"object"``, ``"enum"``, or ``""`` while nothing has been written.
        dtype: Dtype of a tensor field.
        shape: Shape of one row, with None for the dimension in which rows differ. While all rows have had one shape, it
            has no None, even if they came as a nested tensor.
        nested: Whether a nested tensor was ever put; the field is then always read as torch.jagged.
        enum: Vocabulary of an enum field; values are stored as indices into it.
    """

    kind: str = ""
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] = ()
    nested: bool = False
    enum: tuple[str, ...] = ()

    @property
    def ragged_dim(self) -> int:
        """The dimension of a row in which rows differ; 0 if none is known yet."""
        return self.shape.index(None) if None in self.shape else 0

    def merge(self, new: FieldSpec, name: str) -> FieldSpec:
        """Return the spec after a put of ``new``.

        Raises:
            DataPlaneBadRequest: The kinds, dtypes, ranks or vocabularies differ, or rows would differ in two
                dimensions.
        """
        if self == new or not new.kind:
            return self
        if (self.enum and new.kind != "enum") or new.enum != self.enum[: len(new.enum)]:
            msg = f"field {name!r} has the vocabulary {list(self.enum)}; the put is of {new.describe()}"
            raise self._error(msg, name)
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
        """Return the type as text, such as ``float32[4, *]``."""
        if self.kind == "tensor":
            dims = ", ".join("*" if d is None else str(d) for d in self.shape)
            return f"{str(self.dtype).removeprefix('torch.')}[{dims}]"
        return f"enum({', '.join(self.enum)})" if self.kind == "enum" else self.kind
