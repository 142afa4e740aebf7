"""The field lists of a request: each names a field once, and refs refer to them by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdp.errors import DataPlaneBadRequest

from ..wire.messages import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..wire.messages import SlotRows

__all__ = ["FieldLists", "refuse_twice"]


class FieldLists:
    """The field lists of a request; each is checked when the first ref names it."""

    def __init__(self, lists: Sequence[tuple[str, ...]]) -> None:
        self._lists = lists
        self._checked: set[int] = set()

    def of(self, ref: SlotRows) -> tuple[str, ...]:
        """Return the fields of a ref.

        Raises:
            DataPlaneBadRequest: A field is named twice.
        """
        if ref.fields >= len(self._lists):
            raise WireError(f"field list {ref.fields} of {len(self._lists)}")
        fields = self._lists[ref.fields]
        if ref.fields not in self._checked:
            refuse_twice(fields)
            self._checked.add(ref.fields)
        return fields


def refuse_twice(fields: tuple[str, ...]) -> None:
    """Refuse fields of which one is named twice."""
    if len(set(fields)) != len(fields):
        raise DataPlaneBadRequest("a field is named twice")
