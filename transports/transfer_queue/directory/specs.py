"""What a partition fixed about its fields, in the form that travels: plain tuples.

A spec is ``(kind, dtype, shape, nested, enum)``; the meaning of each is that of :class:`asyncdp.block.FieldSpec`, with
the dtype by name. Kept here a second time because the controller's process need not have asyncdp.
"""

from __future__ import annotations

from asyncdp.transports.transfer_queue.directory.state import Refused

__all__ = ["NOTHING", "Spec", "describe", "merge"]

Spec = tuple[str, str, tuple["int | None", ...], bool, tuple[str, ...]]

#: A field that is declared and was never written.
NOTHING: Spec = ("", "", (), False, ())


def describe(spec: Spec) -> str:
    """Text of the type, such as ``float32[4, *]``."""
    kind, dtype, shape, _, enum = spec
    if kind == "tensor":
        return f"{dtype}[{', '.join('*' if size is None else str(size) for size in shape)}]"
    return f"enum({', '.join(enum)})" if kind == "enum" else kind


def merge(old: Spec, new: Spec, name: str) -> Spec:
    """Return the spec after a put of ``new``; refuses another kind, dtype or rank, and rows that differ twice."""
    if old == new or not new[0]:
        return old
    if not old[0]:
        return (*new[:4], old[4])
    if old[0] != new[0]:
        raise _refused(name, f"field {name!r} holds {describe(old)}, not {describe(new)}")
    if old[0] != "tensor":
        return old
    if old[1] != new[1] or len(old[2]) != len(new[2]):
        what = "dtype" if old[1] != new[1] else "rank"
        raise _refused(name, f"field {name!r} holds {describe(old)}; a put of {describe(new)} would change its {what}")
    shape = tuple(a if a == b else None for a, b in zip(old[2], new[2], strict=True))
    if shape.count(None) > 1:
        raise _refused(
            name, f"field {name!r} holds {describe(old)}; with {describe(new)} its rows would differ in two dimensions"
        )
    return ("tensor", old[1], shape, old[3] or new[3], old[4])


def _refused(name: str, text: str) -> Refused:
    return Refused("DataPlaneBadRequest", text, field=name)
