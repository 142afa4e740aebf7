"""A transport of one's own: payload in files of a folder, metadata in the directory in Python, all in this process."""

# For pyright an attribute whose type is a TensorDict is of an unknown type.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import contextlib
import itertools
import os
import pickle
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

from anyio import to_thread

from asyncdp import ClaimInfo, DataPlaneCapabilities, KVBatchMeta, PartitionInfo, RowHandle, Service
from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.calls import slots as s
from asyncdp.calls.answers import claim_try, group_meta, published, refusal, written
from asyncdp.config import Config, parse_config, shared_config
from asyncdp.errors import DataPlaneError, DataPlaneUnavailable, StaleSlotError
from asyncdp.rows import Block, FieldSpec, field_names
from asyncdp.transports.directory.directory import Directory
from asyncdp.transports.directory.listing import find, page
from asyncdp.transports.directory.rows import Cell


class RowFile:
    """The file with the rows of one put; ``live`` has the indexes of those that the directory refers to."""

    home = "folder"  # the directory lists rows as lost whose home is gone; this one is always there

    def __init__(self, folder: Path, number: int, rows: int) -> None:
        self.path, self.number, self.live = folder / str(number), number, set(range(rows))


class FolderDirectory(Directory):
    """Records which samples the plane has, in which file each is stored, and who claimed them."""

    error = staticmethod(refusal)
    new_spec = FieldSpec

    def __init__(self, config: Config) -> None:
        how = {"strict_schema": config.strict_schema, "auto_register": config.auto_register}
        super().__init__(config.storage_capacity, config.group_id_pattern, **how)
        self.pid, self.files, self.numbers = os.getpid(), dict[int, RowFile](), itertools.count()

    def discard(self, cell: Cell) -> None:
        file: RowFile = cell.place
        file.live.discard(cell.index)
        if not file.live:
            del self.files[file.number]
            file.path.unlink(missing_ok=True)


class FolderTransport(Service):
    """A client of the plane in a folder, whose path is ``controller_address`` of the config (default: a new one)."""

    #: The directories of this process by folder, to which clients with ``bootstrap=False`` attach.
    planes: ClassVar[weakref.WeakValueDictionary[str, FolderDirectory]] = weakref.WeakValueDictionary()

    def __init__(self, config: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        super().__init__()
        parsed = parse_config({**config, "impl": "memory"})  # checks the keys that every transport has
        self.call_timeout_s, self._lease_s = parsed.call_timeout_s, parsed.claim_lease_s
        self._owner = parsed.owner or f"{os.getpid()}:{id(self)}"
        self.folder = parsed.controller_address or tempfile.mkdtemp(prefix="asyncdp-")
        self._config = {**config, "controller_address": self.folder}
        self._owned = FolderDirectory(parsed) if bootstrap else None
        if self._owned is not None:
            self.planes[self.folder] = self._owned

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FolderTransport, bootstrap=False), (self.attach_config(),)

    def attach_config(self) -> dict[str, Any]:
        return shared_config(self._config)

    def get_capabilities(self) -> DataPlaneCapabilities:
        can = ("atomic_batch_put", "verified_clear", "mutation_dedup", "claim_release", "atomic_tags", "claim_dedup")
        return DataPlaneCapabilities(**dict.fromkeys((*can, "slot_addressable", "bound_mutations"), True))

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def directory(self) -> FolderDirectory:
        found = self.planes.get(self.folder)
        if found is None or found.pid != os.getpid():
            raise DataPlaneUnavailable(f"no plane is open at {self.folder} in this process")
        return found

    async def on_close(self) -> None:
        if self._owned is not None:
            self.planes.pop(self.folder, None)
            await to_thread.run_sync(partial(shutil.rmtree, self.folder, ignore_errors=True))

    @handles(c.PutSamples)
    async def put(self, call: c.PutSamples, ctx: CallContext) -> KVBatchMeta:
        """Write a file, then publish its rows in one step; until then no reader sees them."""
        directory, names, n = self.directory, field_names(call.fields), len(call.sample_ids)
        specs, _ = directory.prepare(call.partition_id, call.sample_ids, names, call.only)
        block = Block.from_fields({} if call.fields is None else call.fields, n, specs, ctx.env.codec)
        sizes = {name: tuple(column.row_nbytes().tolist()) for name, column in block.columns.items()}
        file = RowFile(Path(self.folder), next(directory.numbers), n)

        def stored() -> list[Any]:  # called once nothing can refuse the put any more
            directory.files[file.number] = file
            return [(file, names, range(n), range(n))]

        def publish() -> tuple[s.Published, bool]:
            bound = None if call.only is None else (call.only, call.lives, call.skip_stale)
            what = (call.partition_id, call.sample_ids, self.owner, call.tags, block.observed(), bound, sizes)
            return published(directory.put(*what, stored if names else list)), True

        try:
            if names:
                await to_thread.run_sync(file.path.write_bytes, pickle.dumps(block.take(range(n))))
            done = directory.once(*self._once(ctx), publish)
        finally:
            if file.number not in directory.files:  # refused, cancelled, or published by an earlier attempt
                file.path.unlink(missing_ok=True)
        return written(call, names, done)

    @handles(s.Locate)
    async def locate(self, call: s.Locate, ctx: CallContext) -> s.Located:
        """Return the slots of rows: a file is a slot. A row that is not there is an error of its own."""
        part = self.directory.partition(call.partition_id)
        lives = None if call.handles is None else [None if one is None else one.incarnation for one in call.handles]
        found = find(part, call.sample_ids, call.fields, lives)
        spots = found.spots.items()
        refs = [s.SlotRef(HOST, file.number, 1, names, indexes, rows) for (file, names), (indexes, rows) in spots]
        missing = {at: refusal(kind, text, **info) for at, (kind, text, info) in found.missing.items()}
        rows = [None if life is None else RowHandle(life) for life in found.lives]
        return s.Located(tuple(refs), missing, rows, {f: part.fields[f] for f in call.fields if f in part.fields})

    @handles(s.ReadSlots)
    async def read(self, call: s.ReadSlots, ctx: CallContext) -> s.ReadResult:
        """Read the rows of each slot; a slot whose rows were removed since Locate is an error in the result."""
        files, errors = dict[int, IO[bytes]](), dict[int, DataPlaneError]()
        with contextlib.ExitStack() as stack:
            for at, ref in enumerate(call.refs):
                file = self.directory.files.get(ref.slot)
                if file is None or not file.live.issuperset(ref.index):
                    errors[at] = StaleSlotError(f"rows of file {ref.slot} were removed")
                else:  # opened at once: it can be read to its end even if its rows are removed meanwhile
                    files[at] = stack.enter_context(file.path.open("rb"))
            blocks = await to_thread.run_sync(lambda: {at: pickle.load(file) for at, file in files.items()})  # noqa: S301
        rows = {at: block.take(call.refs[at].index, call.refs[at].fields) for at, block in blocks.items()}
        parts = [s.Part((at,), block, (block.nbytes,), block.schema_hash()) for at, block in rows.items()]
        return s.ReadResult(tuple(parts), errors)

    @handles(s.TryClaim)
    async def claim(self, call: s.TryClaim, ctx: CallContext) -> s.ClaimTry:
        """Claim what is ready; a claim that waits is asked again every ``claim_meta_poll_interval_s``."""
        what = (call.partition_id, call.task_name, call.required_fields, call.batch_size, call.min_rows)
        return claim_try(call, ctx.op_id, self.directory.claim(*what, *self._once(ctx), self.owner, self._lease_s))

    def _once(self, ctx: CallContext) -> tuple[str, float]:
        """Return the op_id under which a mutation happens once, and its deadline on the directory's clock."""
        return ctx.op_id, self.directory.monotonic() + ctx.remaining()

    async def unserved(self, call: c.Call[Any], ctx: CallContext) -> Any:
        """Answer from the directory alone what no method above serves."""
        answer = next((ANSWERS[kind] for kind in type(call).__mro__ if kind in ANSWERS), None)
        return await super().unserved(call, ctx) if answer is None else answer(self.directory, call, self._once(ctx))


#: One host with one port, so there is nothing to rotate over; it is never gone.
HOST, GONE = s.HostRef("folder", 1, (0,)), frozenset[str]()
ANSWERS: dict[type, Callable[[FolderDirectory, Any, tuple[str, float]], Any]] = {
    c.Ping: lambda _, __, ___: None,
    c.RegisterPartition: lambda d, q, _: d.register(
        q.partition_id, q.fields, q.num_samples, q.consumer_tasks, q.grpo_group_size, q.enums
    ),
    s.TryPartition: lambda d, q, _: q.partition_id in d.partitions,
    c.ListPartitions: lambda d, _, __: [PartitionInfo(*one) for one in d.listing()],
    c.DescribePartition: lambda d, q, _: PartitionInfo(*d.describe(q.partition_id)),
    c.DropPartition: lambda d, q, once: d.drop(q.partition_id, *once)[0],
    c.ClearSamples: lambda d, q, once: d.clear(q.partition_id, q.sample_ids, *once, q.owner, q.claims, q.lives)[0],
    c.ListMetadata: lambda d, q, _: sorted(
        (group_meta(q.partition_id, one, GONE) for one in page(d.partition(q.partition_id), 0, sys.maxsize)[0]),
        key=lambda group: group.created_at,
    ),
    c.Depth: lambda d, q, _: d.depth(q.partition_id, GONE),
    c.CheckConsumptionStatus: lambda d, q, _: d.consumed(q.partition_id, q.task_names),
    c.ListClaims: lambda d, q, _: [ClaimInfo(*one) for one in d.list_claims(q.partition_id, q.task_name)],
    c.ReleaseClaim: lambda d, q, once: d.release(q.partition_id, q.task_name, q.sample_ids, q.claim_ids, *once),
    c.ReleaseClaims: lambda d, q, once: d.release_owner(q.partition_id, q.owner, *once),
    s.AbandonClaim: lambda d, q, _: d.abandon(q.partition_id, q.claim_id),
    s.Resolve: lambda d, q, _: s.Resolved(d.resolve(q.op_id, q.age_s)),
}
