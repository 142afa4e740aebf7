"""A data plane as a plain dict: what a plane has to show after each verb, with no slots, no clients and no time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Model", "Part", "Row"]


@dataclass
class Row:
    """One sample.

    Attributes:
        owner: Who put it first.
        life: Which life of its id; grows from row to row.
        cells: Values by field.
        since: When each field was first there, and when it last began to be fit, by the number of the put.
        claims: {task: (number of the claim, owner)}
    """

    owner: str
    life: int
    group: str
    cells: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    fit_since: int | None = None
    claims: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass
class Part:
    """One partition."""

    group_size: int | None
    fields: set[str] = field(default_factory=set)
    tasks: dict[str, None] = field(default_factory=dict)
    enums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)

    def groups(self) -> dict[str, list[str]]:
        """Keys of each group, oldest first."""
        out: dict[str, list[str]] = {}
        for name, row in sorted(self.rows.items(), key=lambda item: item[1].life):
            out.setdefault(row.group, []).append(name)
        return out

    def whole(self, group: str, keys: list[str]) -> bool:
        """Whether all of a group is there."""
        return len(fit_of(self, keys)) >= self.due(group, keys)

    def due(self, group: str, keys: list[str]) -> int:
        """How many rows a group is to have."""
        return self.expected.get(group) or self.group_size or len(keys)

    def ready(self, task: str, fields: list[str]) -> list[list[str]]:
        """Return what the task may claim, in units that go together, in the order in which it is handed out."""

        def since(name: str) -> int | None:
            row = self.rows[name]
            if row.fit_since is None or task in row.claims or any(f not in row.since for f in fields):
                return None
            return max([row.fit_since, *(row.since[f] for f in fields)])

        units = [[name] for name in self.rows]
        if self.group_size is not None:
            units = [keys for group, keys in self.groups().items() if self.whole(group, keys)]
        timed = []
        for keys in units:
            unit = keys if self.group_size is None else fit_of(self, keys)
            moments = [since(name) for name in unit]
            if None not in moments:
                born = min(self.rows[name].life for name in keys)
                timed.append((max(m for m in moments if m is not None), born, unit))
        return [unit for _, _, unit in sorted(timed)]


def fit_of(part: Part, keys: list[str]) -> list[str]:
    """Return the rows of a group that count: all but the failed ones."""
    return [name for name in keys if part.rows[name].tags.get("status") != "failed"]


@dataclass
class Model:
    """All partitions."""

    parts: dict[str, Part] = field(default_factory=dict)
    count: int = 0

    def register(self, pid: str, fields: list[str], tasks: list[str], size: int | None, enums: dict[str, Any]) -> None:
        """Unite."""
        part = self.parts.setdefault(pid, Part(size))
        part.fields |= {*fields, *enums}
        part.tasks.update(dict.fromkeys(tasks))
        for name, words in enums.items():
            part.enums[name] = tuple(dict.fromkeys((*part.enums.get(name, ()), *words)))

    def put(
        self, pid: str, ids: list[str], owner: str, cells: dict[str, list[Any]], tags: list[dict[str, Any]] | None
    ) -> None:
        """Replace the same fields, merge tags."""
        part = self.parts[pid]
        part.fields |= set(cells)
        self.count += 1
        for at, name in enumerate(ids):
            given = {} if tags is None else tags[at]
            row = part.rows.get(name)
            if row is None:
                home = str(given.get("group_id", name.rpartition("_g")[0] or name))
                row = part.rows[name] = Row(owner, self.count * 100 + at, home)
            row.cells.update({f: values[at] for f, values in cells.items()})
            for f in cells:
                row.since.setdefault(f, self.count)
            row.tags.update(given)
            row.group = str(row.tags.get("group_id", row.group))
            fit = row.tags.get("committed") is not False and row.tags.get("status") != "failed"
            row.fit_since = (row.fit_since or self.count) if fit else None
            if "expected_num_keys" in row.tags:
                part.expected[row.group] = max(row.tags["expected_num_keys"], part.expected.get(row.group, 0))
            part.expected = {g: n for g, n in part.expected.items() if g in part.groups()}

    def claim(self, pid: str, task: str, fields: list[str], most: int, owner: str) -> tuple[int, list[str]]:
        """Take the first ready ones; whole units only."""
        part = self.parts[pid]
        self.count += 1
        taken: list[str] = []
        for unit in part.ready(task, fields):
            if len(taken) + len(unit) > most:
                break
            taken += unit
        for name in taken:
            part.rows[name].claims[task] = (self.count, owner)
        return self.count, taken

    def release(self, pid: str, task: str, ids: list[str]) -> None:
        """Make claimable again."""
        for name in ids:
            del self.parts[pid].rows[name].claims[task]

    def release_owner(self, pid: str, owner: str) -> None:
        """Make all that an owner claimed claimable again."""
        for row in self.parts[pid].rows.values() if pid in self.parts else ():
            row.claims = {task: claim for task, claim in row.claims.items() if claim[1] != owner}

    def clear(self, pid: str, ids: list[str] | None, owner: str) -> None:
        """Remove what is there; None: what this owner put."""
        part = self.parts.get(pid)
        if part is None:
            return
        for name in [n for n, row in part.rows.items() if row.owner == owner] if ids is None else ids:
            part.rows.pop(name, None)
        part.expected = {g: n for g, n in part.expected.items() if g in part.groups()}

    def view(self) -> dict[str, Any]:
        """Return all that can be seen of the plane from outside."""
        return {pid: _view(part) for pid, part in self.parts.items()}


def _view(part: Part) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for group, keys in part.groups().items():
        rows = [part.rows[name] for name in keys]
        versions = [row.tags["weight_version"] for row in rows if row.tags.get("weight_version") is not None]
        groups[group] = {
            "keys": keys,
            "version": min(versions, default=None),
            "committed": all(part.rows[name].tags.get("committed") is not False for name in fit_of(part, keys) or keys),
            "due": part.due(group, keys),
            "tags": [row.tags for row in rows],
        }
    return {
        "fields": part.fields,
        "tasks": list(part.tasks),
        "enums": part.enums,
        "size": len(part.rows),
        "groups": groups,
        "depth": sum(g["committed"] and len(fit_of(part, g["keys"])) >= g["due"] for g in groups.values()),
        "cells": {name: row.cells for name, row in part.rows.items()},
        "claims": {t: {n: r.claims[t][1] for n, r in part.rows.items() if t in r.claims} for t in part.tasks},
        "consumed": {t: all(t in row.claims for row in part.rows.values()) for t in part.tasks},
    }
