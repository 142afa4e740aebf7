"""Nemo: the layer with which a client behaves as NeMo-RL's, in what the config's ``nemo`` selects."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from asyncdp.calls import (
    Call,
    ClaimMeta,
    ClearSamples,
    GetSamples,
    ListMetadata,
    PutSamples,
    RegisterPartition,
    handles,
)
from asyncdp.config import NemoSettings
from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, PartialReadError
from asyncdp.rows.block import field_names, raw_leaf
from asyncdp.service import Layer

from .errors import translated
from .rendezvous import Plane, announce

if TYPE_CHECKING:
    from asyncdp.calls import CallContext
    from asyncdp.client import Client
    from asyncdp.meta import KVBatchMeta
    from asyncdp.service import Service

__all__ = ["Nemo", "rectangular"]

R = TypeVar("R")


class Nemo(Layer):
    """Translates calls, results and errors between NeMo-RL's meaning and asyncdp's; the outermost layer.

    Args:
        inner: The next layer.
        settings: What to translate; None: everything, as NeMo-RL has it.
    """

    def __init__(self, inner: Service | Client, settings: NemoSettings | None = None) -> None:
        """Keep the settings."""
        super().__init__(inner)
        self.settings = settings or NemoSettings()
        self._withdraw: Callable[[], None] | None = None

    def announce(self, plane: Plane, address: str) -> None:
        """Make the plane known to workers with the driver's config, until this client is closed or gone."""
        self._withdraw = weakref.finalize(self, announce(plane, address))

    async def on_close(self) -> None:
        """Withdraw the announcement; close the wrapped service."""
        if self._withdraw is not None:
            self._withdraw()
        await super().on_close()

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Serve the call; translate the error that it raises."""
        try:
            return await super().execute(call, ctx)
        except DataPlaneError as err:
            found = self._leaving(err, call)
            if found is err:
                raise
            raise found from found.__cause__
        except ExceptionGroup as group:
            first = _first(group)
            if not isinstance(first, DataPlaneError):
                raise
            found = self._leaving(first, call)
            raise found from found.__cause__

    def _leaving(self, err: DataPlaneError, call: Call[Any]) -> DataPlaneError:
        if self.settings.rectangles and isinstance(err, PartialReadError) and err.ok.size:
            rectangular(err.rows)
        return translated(err, call) if self.settings.infrastructure_errors else err

    @handles(RegisterPartition)
    async def register(self, call: RegisterPartition, ctx: CallContext) -> None:
        """Declare a partition: without a group size, and anew if it is empty."""
        size = call.grpo_group_size if self.settings.whole_groups else None
        await self.inner.execute(replace(call, grpo_group_size=size, anew=self.settings.declare_anew), ctx)

    @handles(ClaimMeta)
    async def claim(self, call: ClaimMeta, ctx: CallContext) -> KVBatchMeta:
        """Claim what is ready, up to ``batch_size``, once anything is."""
        if self.settings.partial_claims and call.min_batch_size is None:
            call = replace(call, min_batch_size=1)
        return await self.inner.execute(call, ctx)

    @handles(PutSamples)
    async def put(self, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
        """Put arrays of objects of several dimensions as one list per row."""
        if self.settings.object_arrays and call.fields is not None:
            call = replace(call, fields=_with_lists(call.fields, len(call.sample_ids)))
        return await self.inner.execute(call, ctx)

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> TensorDict:
        """Read rows; ragged fields whose rows have one shape come back dense."""
        found = await self.inner.execute(call, ctx)
        return rectangular(found) if self.settings.rectangles else found

    @handles(ClearSamples)
    async def clear(self, call: ClearSamples, ctx: CallContext) -> int:
        """Remove samples; ``None``: all of the partition."""
        if call.sample_ids is not None or not self.settings.clear_all:
            return await self.inner.execute(call, ctx)
        try:
            groups = await self.inner.execute(ListMetadata(call.partition_id), ctx)
        except DataPlaneBadRequest as err:
            if err.field != "partition_id":
                raise
            return 0  # removing from a partition that does not exist is no error
        ids = tuple(key for group in groups for key in group.keys)
        return await self.inner.execute(replace(call, sample_ids=ids, owner=""), ctx) if ids else 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group that may have groups in it."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def rectangular(rows: TensorDict) -> TensorDict:
    """Make the nested leaves of ``rows`` whose rows have one shape dense, in place, and return ``rows``.

    A leaf without rows stays nested, as it has no shape.
    """
    for name in cast("list[str]", list(rows.keys())):
        leaf = raw_leaf(rows, name)
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            dense = _dense(leaf)
            if dense is not None:
                rows.set(name, dense)
    return rows


def _dense(leaf: Any) -> torch.Tensor | None:
    """Return a nested tensor as a dense one; None if its rows differ in shape or there are none."""
    n = int(leaf.size(0))
    if not n:
        return None
    if leaf.layout != torch.jagged or leaf.lengths() is not None:
        rows = list(leaf.unbind())
        return torch.stack(rows) if all(row.shape == rows[0].shape for row in rows) else None
    lengths = leaf.offsets().diff()
    if not bool((lengths == lengths[0]).all()):
        return None
    dim = leaf._ragged_idx - 1  # noqa: SLF001 - torch has no public name for it
    dense = leaf.values().unflatten(dim, (n, int(lengths[0])))
    return cast("torch.Tensor", dense if dim == 0 else dense.movedim(dim, 0).contiguous())


def _with_lists(fields: Any, n: int) -> Any:
    """Return the same fields with arrays of objects of shape ``(n, m, ...)`` as one list per row."""
    found: dict[str, Any] = {}
    for name in field_names(fields):
        leaf = raw_leaf(fields, name)
        data = leaf.data if isinstance(leaf, NonTensorData) else leaf
        if isinstance(data, np.ndarray) and data.dtype == object and data.ndim > 1 and len(data) == n:
            found[name] = NonTensorStack(*(NonTensorData(row) for row in data.tolist()))
    if not found:
        return fields
    return {name: found[name] if name in found else raw_leaf(fields, name) for name in field_names(fields)}
