"""What a partition fixed about its fields, where asyncdp need not be installed."""

from __future__ import annotations

from typing import NamedTuple

from asyncdp.transports.directory.partition import Refused

__all__ = ["Spec"]


class Spec(NamedTuple):
    """As :class:`asyncdp.block.FieldSpec`, with the dtype by name. It travels as a plain tuple.

    Kept here a second time because the controller's process need not have asyncdp.
    """

    kind: str = ""
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    nested: bool = False
    enum: tuple[str, ...] = ()

    def describe(self) -> str:
        """Text of the type, such as ``float32[4, *]``."""
        if self.kind == "tensor":
            return f"{self.dtype}[{', '.join('*' if size is None else str(size) for size in self.shape)}]"
        return f"enum({', '.join(self.enum)})" if self.kind == "enum" else self.kind

    def merge(self, new: Spec, name: str) -> Spec:
        """Return the spec after a put of ``new``; refuses another kind, dtype or rank, and rows that differ twice."""
        if self == new or not new.kind:
            return self
        if not self.kind:
            return new._replace(enum=self.enum)
        if self.kind != new.kind:
            raise _refused(name, f"field {name!r} holds {self.describe()}, not {new.describe()}")
        if self.kind != "tensor":
            return self
        if self.dtype != new.dtype or len(self.shape) != len(new.shape):
            what = "dtype" if self.dtype != new.dtype else "rank"
            text = f"field {name!r} holds {self.describe()}; a put of {new.describe()} would change its {what}"
            raise _refused(name, text)
        shape = tuple(a if a == b else None for a, b in zip(self.shape, new.shape, strict=True))
        if shape.count(None) > 1:
            text = (
                f"field {name!r} holds {self.describe()}; with {new.describe()} its rows would differ in two dimensions"
            )
            raise _refused(name, text)
        return self._replace(shape=shape, nested=self.nested or new.nested)


def _refused(name: str, text: str) -> Refused:
    return Refused("DataPlaneBadRequest", text, field=name)
