"""The schema of a partition: clients read and write it, guarded by a version on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgpack

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.rows.field_spec import FieldSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdp.calls import RegisterPartition

__all__ = ["ABSENT", "Schema"]

#: Most choices of fields whose definitions a schema keeps together.
_MOST_SPECS: Final = 64


@dataclass(frozen=True, slots=True)
class Schema:
    """One version of a partition's schema.

    A client changes a copy, and the server accepts it only where its version is still that of the original
    (compare-and-swap); otherwise the client gets the newer version and repeats the change.

    Attributes:
        version: Increases with each change, even when a partition is dropped and registered again; ``b"0"``: the
            partition does not exist yet.
        fields: Field definitions by name, in order of their first use; fields are numbered from 1 in this order.
        declared: Names of the fields that were declared, not only written.
        tasks: Names of the tasks; they are numbered from 1 in this order.
        num_samples, group_size: Expected number of samples and rows per group, as declared; group_size None: no groups.
        numbers: Field numbers by name.
    """

    version: bytes
    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    declared: frozenset[str] = frozenset()
    tasks: tuple[str, ...] = ()
    num_samples: int = 0
    group_size: int | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)
    _specs: dict[tuple[str, ...], dict[str, FieldSpec]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def specs_of(self, names: tuple[str, ...]) -> Mapping[str, FieldSpec]:
        """Return the definitions of those of these fields that there are; the same mapping for the same names."""
        known = self._specs.get(names)
        if known is None:
            if len(self._specs) >= _MOST_SPECS:
                self._specs.clear()
            known = self._specs[names] = {name: self.fields[name] for name in names if name in self.fields}
        return known

    @classmethod
    def load(cls, version: bytes, doc: bytes) -> Schema:
        """Decode a schema that :meth:`dump` encoded."""
        import torch  # imported here, because code that uses only hosts or the server runs without torch

        raw = msgpack.unpackb(doc, unicode_errors="surrogatepass")
        fields = {}
        for name, _, kind, dtype, shape, nested, words in raw["fields"]:
            made = None if dtype is None else getattr(torch, dtype)
            fields[name] = FieldSpec(kind, made, tuple(shape), nested, tuple(words))
        declared = frozenset(row[0] for row in raw["fields"] if row[1])
        numbers = {name: at for at, name in enumerate(fields, 1)}
        return cls(version, fields, declared, tuple(raw["tasks"]), raw["num_samples"], raw["group_size"], numbers)

    def dump(self) -> bytes:
        """Encode everything but the version."""
        rows = [
            (
                name,
                name in self.declared,
                spec.kind,
                None if spec.dtype is None else str(spec.dtype).removeprefix("torch."),
                spec.shape,
                spec.nested,
                spec.enum,
            )
            for name, spec in self.fields.items()
        ]
        doc = {
            "fields": rows,
            "tasks": self.tasks,
            "num_samples": self.num_samples,
            "group_size": self.group_size,
        }
        packed: bytes = msgpack.packb(doc, unicode_errors="surrogatepass")
        return packed

    def _with(self, fields: Mapping[str, FieldSpec], **changes: Any) -> Schema:
        numbers = {name: at for at, name in enumerate(fields, 1)}
        return replace(self, fields=fields, numbers=numbers, **changes)

    def united(self, call: RegisterPartition) -> Schema:
        """Return the schema merged with a declaration.

        Raises:
            DataPlaneBadRequest: The group size differs, or a vocabulary is given for a field of another kind.
        """
        if call.anew:
            return self._with({name: FieldSpec() for name in self.fields}, group_size=None).united(
                replace(call, anew=False)
            )
        size = call.grpo_group_size
        if size is not None and self.group_size not in (None, size):
            msg = f"partition {call.partition_id!r} has grpo_group_size {self.group_size}, not {size}"
            raise DataPlaneBadRequest(msg, partition_id=call.partition_id, field="grpo_group_size")
        fields = dict(self.fields)
        for name in call.fields:
            fields.setdefault(name, FieldSpec())
        for name, words in call.enums.items():
            old = fields.get(name, FieldSpec())
            if old.kind not in ("", "enum"):
                msg = f"field {name!r} holds {old.describe()} and cannot get a vocabulary"
                raise DataPlaneBadRequest(msg, partition_id=call.partition_id, field=name)
            # Existing words keep their numbers.
            fields[name] = FieldSpec(old.kind, enum=tuple(dict.fromkeys(old.enum + tuple(words))))
        return self._with(
            fields,
            declared=self.declared.union(call.fields, call.enums),
            tasks=tuple(dict.fromkeys((*self.tasks, *call.consumer_tasks))),
            num_samples=max(self.num_samples, call.num_samples),
            group_size=self.group_size if size is None else size,
        )

    def merged(self, specs: Mapping[str, FieldSpec]) -> Schema:
        """Return the schema after a put of these fields; the same object where nothing changes.

        Raises:
            DataPlaneBadRequest: A field contradicts its existing definition.
        """
        merged = {name: self.fields.get(name, FieldSpec()).merge(spec, name) for name, spec in specs.items()}
        if all(self.fields.get(name) == spec for name, spec in merged.items()):
            return self
        return self._with({**self.fields, **merged})

    def check_declared(self, partition_id: str, names: Iterable[str]) -> None:
        """Raise DataPlaneBadRequest where one of the fields was not declared."""
        for name in names:
            if name not in self.declared:
                msg = f"field {name!r} is not declared in partition {partition_id!r}"
                raise DataPlaneBadRequest(msg, partition_id=partition_id, field=name)

    def task(self, partition_id: str, task: str) -> int:
        """Return the number of a task; raise DataPlaneBadRequest where it was not declared."""
        if task not in self.tasks:
            msg = f"partition {partition_id!r} has no task {task!r}; it has {list(self.tasks)}"
            raise DataPlaneBadRequest(msg, partition_id=partition_id, field="task_name")
        return self.tasks.index(task) + 1

    def required(self, partition_id: str, names: Sequence[str]) -> list[int]:
        """Return the numbers of these fields, ascending; raise DataPlaneBadRequest where one is unknown."""
        for name in names:
            if name not in self.numbers:
                msg = (
                    f"required field {name!r} is neither declared in partition {partition_id!r} nor was it ever written"
                )
                raise DataPlaneBadRequest(msg, partition_id=partition_id, field=name)
        return sorted({self.numbers[name] for name in names})


#: Schema of a partition that does not exist yet.
ABSENT = Schema(b"0")
