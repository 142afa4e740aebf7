"""Placement and publication of puts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdp.calls.answers import living_rows, stale_rows
from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, DataPlaneNotReady
from asyncdp.meta import RowHandle

from ..encoding.cells import DeadCells, cells_of, hints_of, mark_of, replaced_cells
from ..encoding.msgpack_codec import load, pack, text
from ..encoding.rows import rid_of, row_parts
from .base import no_name
from .hosts import PLACE_AGE_S, HostInfo, Hosts
from .partitions import Partitions

if TYPE_CHECKING:
    from asyncdp.calls import Only
    from asyncdp.calls.slots import Publish
    from asyncdp.rows.block import FieldSpec

    from ..encoding.operation_ids import OperationId
    from ..encoding.schema import Schema
    from ..server.link import DirectoryLink
    from ..settings import DirectorySettings

__all__ = ["Published", "Publishing", "PutHosts"]


@dataclass(frozen=True, slots=True)
class PutHosts:
    """The hosts that a put may go to, and what the partition knows about it.

    Attributes:
        hosts: Live hosts, the least loaded first.
        specs: Definitions of the put's fields that the partition has so far, by name.
        new: Number of the samples that do not exist yet; None where the server was not asked.
    """

    hosts: tuple[HostInfo, ...]
    specs: Mapping[str, FieldSpec]
    new: int | None


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a put.

    Attributes:
        handles: Per row the handle of its life; None for a row that was left out as stale.
        created: Per row whether the put created it.
        dead: Cells that the put replaced, and cells that were written for rows that it left out.
    """

    handles: tuple[RowHandle | None, ...]
    created: tuple[bool, ...]
    dead: tuple[DeadCells, ...]


class Publishing(Partitions, Hosts):
    """Sends the requests that place and publish puts.

    Args:
        link, settings: Connections to the server, and configuration of the client.
        capacity: Most samples of the plane.
        group_pattern: Regular expression with a group named ``group``, which extracts a sample's group from its id.
        strict_schema: Whether fields must be declared before they are written.
        auto_register: Whether a put declares an unknown partition.
    """

    def __init__(
        self,
        link: DirectoryLink,
        settings: DirectorySettings,
        *,
        capacity: int,
        group_pattern: str,
        strict_schema: bool,
        auto_register: bool,
    ) -> None:
        """Start with no cached counts."""
        super().__init__(link, settings)
        self._capacity = capacity
        self._pattern = re.compile(group_pattern)
        self._strict = strict_schema
        self._auto = auto_register
        self._elsewhere: dict[str, tuple[float, int]] = {}

    # -- capacity

    async def _held_elsewhere(self, partition_id: str) -> int:
        """Return the number of samples in all other partitions, cached for ``capacity_age_s``."""
        now = self._link.now()
        known = self._elsewhere.get(partition_id)
        if known is not None and now - known[0] < self._settings.capacity_age_s:
            return known[1]
        names = {text(raw) for raw in await self._link.command("SMEMBERS", self._names)}
        if self._auto and partition_id not in names:  # one that was dropped while it was made anew
            await self._name(partition_id)
        names.discard(partition_id)
        counts = await self._link.pipeline([("HLEN", self._key(name) + "i") for name in names]) if names else []
        for count in counts:
            if isinstance(count, Exception):
                raise count
        total: int = sum(max(count - 1, 0) for count in counts)  # one entry is no sample's
        self._elsewhere[partition_id] = (now, total)
        return total

    def _full(self, held: int, new: int, partition_id: str) -> DataPlaneError:
        self._elsewhere.pop(partition_id, None)
        msg = f"the plane holds {held} of at most {self._capacity} samples; {new} more do not fit"
        return DataPlaneNotReady(msg, retry_after_s=0.05)

    # -- writing

    async def place(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: Sequence[str],
        only: Only | None = None,
        *,
        by_specs: bool = True,
    ) -> PutHosts:
        """Return the hosts for a put, and the partition's definitions of its fields.

        A put of existing rows (``only`` is ``"existing"``) needs no further capacity. Where the definitions do not
        decide how the fields are stored (``by_specs`` is False), and this client knows them all, the server is not
        asked: :meth:`publish` refuses whatever this would have refused.

        Raises:
            DataPlaneBadRequest: The partition is unknown, or a field is undeclared under strict_schema.
            DataPlaneNotReady: The plane holds as many samples as its capacity allows.
        """
        known = {} if by_specs else self._remembered_specs(partition_id, fields)
        if known:
            await self._open()
            return PutHosts(await self._taking(), known, None)

        def make(schema: Schema) -> bytes:
            if self._strict and schema.version != b"0":
                schema.check_declared(partition_id, fields)
            return pack(tuple(sample_ids))

        answer = await self._serve("place", partition_id, make, create=no_name if self._auto else None)
        held, new = load(answer.blob)
        if new and only != "existing":
            held += await self._held_elsewhere(partition_id)
            if held + new > self._capacity:
                raise self._full(held, new, partition_id)
        specs = {name: answer.schema.fields[name] for name in fields if name in answer.schema.fields}
        return PutHosts(await self._taking(), specs, new)

    def _remembered_specs(self, partition_id: str, fields: Sequence[str]) -> dict[str, FieldSpec]:
        """Return the definitions of the fields as this client knows them; empty where it does not know one."""
        schema = self._schemas.get(partition_id)
        known = {} if schema is None else schema.fields
        return {name: known[name] for name in fields} if known.keys() >= set(fields) else {}

    async def _taking(self) -> tuple[HostInfo, ...]:
        """Return the live hosts, the least loaded first."""
        hosts = [host for host in await self.hosts(PLACE_AGE_S) if host.alive]
        return tuple(sorted(hosts, key=lambda host: host.load))

    async def publish(self, op: OperationId, call: Publish, owner: str) -> Published:
        """Publish the written slots of all samples, with their tags, atomically: all of them, or an error and none.

        The server decides here, once, which lives of the rows still exist, and remembers that with the reply.

        Args:
            op: Identifies the put.
            call: The put: its samples, each once, and the lives that it is bound to.
            owner: Client that puts the samples; a sample's owner is the client that created it.

        Returns:
            The result for each sample, and the cells that died, for the invalidation of their hosts. The server is busy
            for 3 us a row, 5 with whole groups: a put of 10,000 rows delays other requests by 0.05 s.

        Raises:
            StaleSlotError: Rows are gone or have another life, and are not to be left out.
            DataPlaneBadRequest: The partition is unknown, a field contradicts its definition, a group would become too
                large, or a row exists although all have to be new.
            DataPlaneNotReady: The plane holds as many samples as its capacity allows.
            DataPlaneWriteError: The put was resolved as not executed before, and is refused.
            DataPlaneTimeout: The request arrived after its deadline.
        """
        partition_id, sample_ids = call.partition_id, call.sample_ids
        if len(set(sample_ids)) != len(sample_ids):
            raise DataPlaneBadRequest("a put names a sample twice", partition_id=partition_id, field="sample_ids")
        fixed = self._columns(call, owner)
        await self._open()
        fixed["elsewhere"] = await self._held_elsewhere(partition_id)
        put = _Put(call, fixed, strict=self._strict)

        def wrong(why: list[Any]) -> DataPlaneError:
            return put.refusal(why) or self._wrong_put(why, partition_id, sample_ids, fixed["groups"])

        create = partial(self._name, partition_id) if self._auto else None
        answer = await self._serve("publish", partition_id, put.payload, op, create=create, wrong=wrong)
        first, n, rids, new, dead, version, moved = load(answer.blob)
        if version and put.merged is not None and put.merged is not answer.schema:
            self._schemas[partition_id] = replace(put.merged, version=version)
        gone = replaced_cells(dead, tuple((put.merged or answer.schema).fields))
        mark = mark_of(version or answer.schema.version, moved)
        hints = hints_of(sample_ids, mark, put.cells or [False] * n)
        if first:
            lives = range(int(first) + 1, int(first) + 1 + n)
            handles = tuple(RowHandle(life, None, hint) for life, hint in zip(lives, hints, strict=True))
            return Published(handles, (True,) * n, gone)
        created = set(new)
        lived = tuple(
            RowHandle(int(rid), None, hint) if rid else None
            for rid, hint in zip(rids or [None] * n, hints, strict=True)
        )
        return Published(lived, tuple(at in created for at in range(1, n + 1)), gone)

    async def _name(self, partition_id: str) -> None:
        """Add a partition to the names of all, before the put that makes it."""
        await self._link.command("SADD", self._names, partition_id.encode("utf-8", "surrogatepass"))

    def _columns(self, call: Publish, owner: str) -> dict[str, Any]:
        """Return the part of the payload without cells: ids, lives, groups, and what the tags say to the server."""
        sample_ids, tags = call.sample_ids, call.tags
        payload: dict[str, Any] = {"ids": sample_ids, "owner": owner, "capacity": self._capacity}
        if call.only is not None:
            lives = call.lives or ()
            payload.update(only=call.only, skip=call.skip_stale, lives=[rid_of(life) for life in lives] or False)
        if tags is None:
            payload["groups"] = [self._group_of(sample_id) for sample_id in sample_ids]
            return payload
        names = set().union(*tags)
        told = (
            [("group_id" in row) + (row.get("group_id") is not None) for row in tags] if "group_id" in names else None
        )
        if told is None:
            payload["groups"] = [self._group_of(sample_id) for sample_id in sample_ids]
        else:
            payload["told"] = told
            payload["groups"] = [
                str(row["group_id"]) if how == 2 else self._group_of(sample_id)  # noqa: PLR2004 - the tag exists and is not None
                for sample_id, row, how in zip(sample_ids, tags, told, strict=True)
            ]
        for name, key, say in _SAID:
            if key in names:
                payload[name] = [say(row[key]) if key in row else _ABSENT[name] for row in tags]
        return payload

    def _group_of(self, sample_id: str) -> str:
        match = self._pattern.fullmatch(sample_id)
        return match["group"] if match else sample_id

    def _wrong_put(
        self, why: list[Any], partition_id: str, sample_ids: Sequence[str], groups: Sequence[str]
    ) -> DataPlaneError:
        what = why[0]
        if what == b"full":
            return self._full(why[1], why[2], partition_id)
        at, count, size = why[1] - 1, why[2], why[3]
        sample_id = sample_ids[at]
        if what == b"expected":
            msg = f"expected_num_keys {count} of sample {sample_id!r} is above grpo_group_size {size}"
            field = "expected_num_keys"
        else:
            msg = f"group {groups[at]!r} would have {count} rows, grpo_group_size is {size}"
            field = "group_id"
        return DataPlaneBadRequest(msg, partition_id=partition_id, sample_ids=(sample_id,), field=field)


class _Put:
    """Builds the payload of one put for a schema.

    Attributes:
        merged: The schema after the put; None until :meth:`payload` was called.
        cells: Per row its packed cells; False: the put has no fields for it. Empty where it has none for any.
    """

    def __init__(self, call: Publish, fixed: Mapping[str, Any], *, strict: bool) -> None:
        """Keep the parts that do not depend on the schema."""
        self.merged: Schema | None = None
        self.cells: Sequence[bytes | bool] = ()
        self._call = call
        self._fixed = fixed
        self._strict = strict
        self._clash: DataPlaneError | None = None

    def payload(self, schema: Schema) -> bytes:
        """Return the payload with the cells of the rows and the schema after the put.

        A contradiction to the schema is raised here, but not for a put that is bound to lives: the server checks the
        lives first, and only rows that may be written have to fit the schema.
        """
        call, merged, clash = self._call, schema, None
        try:
            merged = schema.merged(call.specs)
            if self._strict and schema.version != b"0":
                schema.check_declared(call.partition_id, list(call.specs))
        except DataPlaneError as err:
            if call.only is None:
                raise
            clash = err
        self.merged, self._clash = merged, clash
        payload, ids = dict(self._fixed), call.sample_ids
        cells: Sequence[bytes | bool] = [False] * len(ids)
        nbytes: Sequence[int] = [0] * len(ids)
        if call.refs:
            numbers = merged.numbers if clash is None else dict.fromkeys(call.specs, 0)
            made = cells_of(len(ids), call.refs, numbers, call.nbytes)
            cells, nbytes = made.cells, made.nbytes
            self.cells = cells
            payload.update(shapes=made.shapes, homes=made.homes, shape=made.shape if len(made.shapes) > 1 else False)
        payload["bytes"] = nbytes if len(set(nbytes)) > 1 else nbytes[0]
        payload["parts"] = row_parts(ids, payload["groups"], nbytes, cells, call.tags)
        if payload["groups"] == list(ids):
            payload["groups"] = False
        if clash is not None:
            payload["clash"] = True
        elif merged is not schema or schema.version == b"0":
            payload.update(doc=merged.dump(), gsize=merged.group_size or 0, nt=len(merged.tasks))
        return pack(payload)

    def refusal(self, why: list[Any]) -> DataPlaneError | None:
        """Return the error of an objection by the server about lives or the schema; None for other objections."""
        ids = self._call.sample_ids
        if why[0] == b"clash":
            return self._clash
        if why[0] == b"bound":
            made = living_rows if self._call.only == "new" else stale_rows
            return made(self._call.partition_id, [ids[at - 1] for at in why[1]], len(ids))
        return None


_ABSENT: Mapping[str, Any] = {"exp": False, "com": 0, "st": 0, "cr": False}


def _expected(value: Any) -> int:
    return min(value, 1 << 53) if isinstance(value, int) and value > 0 else -1  # Lua knows no larger integers


def _committed(value: Any) -> int:
    return 2 if value is False else 1


def _created(value: Any) -> float | bool:
    return float(value) if isinstance(value, (int, float)) else False


#: Column of the payload, tag, and conversion of the tag's value for the server; see ``stamp`` in the Lua library.
_SAID = (
    ("exp", "expected_num_keys", _expected),
    ("com", "committed", _committed),
    ("st", "status", lambda value: 1 if value == "failed" else 2),
    ("cr", "created_at", _created),
)
