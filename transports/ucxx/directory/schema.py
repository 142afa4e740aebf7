"""What a partition declares: read and written by clients, guarded by a version on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgpack

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.rows.field_spec import FieldSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdp.calls import RegisterPartition

__all__ = ["ABSENT", "Schema"]


@dataclass(frozen=True, slots=True)
class Schema:
    """One version of a partition's declaration.

    Each change is made on a copy by one client, and taken by the server only where the version is still the one that
    the copy was made of; else the client gets the newer one and does it again.

    Attributes:
        version: Grows with each change, and over the lives of a partition; ``b"0"``: there is none yet.
        fields: {name: spec}, in the order in which they came; their numbers count from 1.
        declared: Which of them were declared, not only written.
        tasks: In order; their numbers count from 1.
        num_samples, group_size: As declared.
    """

    version: bytes
    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    declared: frozenset[str] = frozenset()
    tasks: tuple[str, ...] = ()
    num_samples: int = 0
    group_size: int | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, version: bytes, doc: bytes) -> Schema:
        """Read what :meth:`dump` wrote."""
        import torch  # here, since what has to do with hosts or the server alone goes without

        raw = msgpack.unpackb(doc, unicode_errors="surrogatepass")
        fields = {}
        for name, _, kind, dtype, shape, nested, words in raw["fields"]:
            made = None if dtype is None else getattr(torch, dtype)
            fields[name] = FieldSpec(kind, made, tuple(shape), nested, tuple(words))
        declared = frozenset(row[0] for row in raw["fields"] if row[1])
        numbers = {name: at for at, name in enumerate(fields, 1)}
        return cls(version, fields, declared, tuple(raw["tasks"]), raw["num_samples"], raw["group_size"], numbers)

    def dump(self) -> bytes:
        """Write everything but the version."""
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
        """Return the union with a declaration.

        Raises:
            DataPlaneBadRequest: Another group size, or a vocabulary for a field that holds something else.
        """
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
            # The words that are there keep their numbers.
            fields[name] = FieldSpec(old.kind, enum=tuple(dict.fromkeys(old.enum + tuple(words))))
        return self._with(
            fields,
            declared=self.declared.union(call.fields, call.enums),
            tasks=tuple(dict.fromkeys((*self.tasks, *call.consumer_tasks))),
            num_samples=max(self.num_samples, call.num_samples),
            group_size=self.group_size if size is None else size,
        )

    def merged(self, specs: Mapping[str, FieldSpec]) -> Schema:
        """Return the schema after a put of these; itself where nothing changes.

        Raises:
            DataPlaneBadRequest: A field holds something else.
        """
        merged = {name: self.fields.get(name, FieldSpec()).merge(spec, name) for name, spec in specs.items()}
        if all(self.fields.get(name) == spec for name, spec in merged.items()):
            return self
        return self._with({**self.fields, **merged})

    def check_declared(self, partition_id: str, names: Iterable[str]) -> None:
        """Refuse fields that were not declared."""
        for name in names:
            if name not in self.declared:
                msg = f"field {name!r} is not declared in partition {partition_id!r}"
                raise DataPlaneBadRequest(msg, partition_id=partition_id, field=name)

    def task(self, partition_id: str, task: str) -> int:
        """Return the number of a task; one that is not declared is DataPlaneBadRequest."""
        if task not in self.tasks:
            msg = f"partition {partition_id!r} has no task {task!r}; it has {list(self.tasks)}"
            raise DataPlaneBadRequest(msg, partition_id=partition_id, field="task_name")
        return self.tasks.index(task) + 1

    def required(self, partition_id: str, names: Sequence[str]) -> list[int]:
        """Return the numbers of the fields that a claim needs, ascending."""
        for name in names:
            if name not in self.numbers:
                msg = (
                    f"required field {name!r} is neither declared in partition {partition_id!r} nor was it ever written"
                )
                raise DataPlaneBadRequest(msg, partition_id=partition_id, field=name)
        return sorted({self.numbers[name] for name in names})


#: There is no such partition yet.
ABSENT = Schema(b"0")
