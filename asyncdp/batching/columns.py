"""Read and write named columns of a batch that a :class:`~asyncdp.meta.KVBatchMeta` names.

Thin: :mod:`asyncdp.batching.padding` around ``get_samples``, ``get_data`` and ``put_samples``. Names, arguments and
meaning are those of NeMo-RL (``nemo_rl/data_plane/column_io.py``), with ``await`` and plain dicts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.meta import KVBatchMeta

from .padding import TOKEN_ALIGNED_FIELDS, materialize, pack_jagged_fields, row_lengths

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from asyncdp.calls import Only
    from asyncdp.client import DataPlaneClient
    from asyncdp.meta import Tags
    from asyncdp.protocol import Stale

    from .padding import Layout

__all__ = [
    "GLOBAL_FORWARD_PAD_SEQLEN",
    "INPUT_LENGTHS",
    "PAD_TO_MULTIPLE",
    "TOKEN_ALIGNED_FIELDS",
    "kv_first_write",
    "read_columns",
    "write_columns",
]

# Keys of extra_info: the width in tokens that all ranks pad to, and the multiple to round the width up to.
GLOBAL_FORWARD_PAD_SEQLEN: Final = "global_forward_pad_seqlen"
PAD_TO_MULTIPLE: Final = "pad_to_multiple"
# The column, and the tag, of tokens per row; a claim lifts the tag into KVBatchMeta.sequence_lengths.
INPUT_LENGTHS: Final = "input_lengths"


async def read_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    token_aligned_fields: Collection[str] | None = TOKEN_ALIGNED_FIELDS,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Read fields of the rows of a meta and :func:`~asyncdp.batching.padding.materialize` them.

    Padded fields are as wide as ``meta.extra_info["global_forward_pad_seqlen"]`` says, where a driver stamped it, so
    that all ranks get one width; else as their longest row, rounded up to ``meta.extra_info["pad_to_multiple"]``.

    Args:
        dp_client: Reads by ``get_data`` where the meta has handles (so that a row which lives again is not taken for
            the one that was meant), else by ``get_samples``.
        meta: The rows.
        select_fields: The fields; none is ``{}`` without a request.
        layout: ``"padded"`` or ``"jagged"``.
        pad_value_dict: ``{field: padding value}``, 0 for others.
        token_aligned_fields: Rectangular fields that are padded as well.
        timeout_s: As for any verb; None: the client's default.

    Returns:
        ``{field: column}`` of ``meta.size`` rows, see :func:`~asyncdp.batching.padding.materialize`.

    Raises:
        DataPlaneBadRequest: What the codec refuses, or a stamp in ``extra_info`` that is no width.
        SampleNotFound, StaleSlotError, PartialReadError: As the client's verbs do.
    """
    op = "read_columns"
    meta = KVBatchMeta.of(meta)
    names = _names(select_fields, op, "select_fields", meta.partition_id)
    if not names:
        return {}
    least = _stamp(meta, GLOBAL_FORWARD_PAD_SEQLEN, 0)
    multiple = 1 if least else _stamp(meta, PAD_TO_MULTIPLE, 1)
    limit = _limit(timeout_s)
    if meta.handles is not None:
        rows = await dp_client.get_data(meta, names, **limit)
    else:
        rows = await dp_client.get_samples(meta.sample_ids, meta.partition_id, names, **limit)
    return materialize(
        rows,
        layout,
        pad_value_dict,
        least,
        pad_to_multiple=multiple,
        token_aligned_fields=token_aligned_fields,
    )


async def write_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    fields: Mapping[str, Any],
    *,
    token_aligned_fields: Collection[str] | None = TOKEN_ALIGNED_FIELDS,
    stale: Stale = "raise",
    timeout_s: float | None = None,
) -> KVBatchMeta:
    """Write fields to rows that are already there, in the lives that the meta names.

    Args:
        dp_client: Writes by ``put_samples``.
        meta: The rows. Its ``sequence_lengths`` say what of the token-aligned fields is no padding; without them every
            field is written as it is.
        fields: ``{name: column}`` as :func:`~asyncdp.batching.padding.pack_jagged_fields` takes them; none is no
            request.
        token_aligned_fields: The fields with one value per token.
        stale: What becomes of rows that were removed since, or live again: ``"raise"`` writes nothing, ``"skip"``
            writes the others.
        timeout_s: As for any verb; None: the client's default.

    Returns:
        The meta of the rows that were written, as ``put_samples`` returns it; of no fields the meta itself.

    Raises:
        StaleSlotError: Rows are gone, or live again; ``sample_ids`` names them, nothing was written.
        DataPlaneBadRequest: A column cannot be kept, or has not ``meta.size`` rows; nothing was written.
        DataPlaneUnsupported: The client cannot bind a put to lives.
    """
    meta = KVBatchMeta.of(meta)
    if not fields:
        return meta
    packed = pack_jagged_fields(fields, lengths=meta.sequence_lengths, token_aligned_fields=token_aligned_fields)
    if packed.batch_size[0] != meta.size:
        name = next(iter(fields))
        msg = f"{name!r}: has {packed.batch_size[0]} rows, the batch has {meta.size}"
        raise DataPlaneBadRequest(msg, op="write_columns", partition_id=meta.partition_id, field=name)
    how: dict[str, Any] = {} if stale == "raise" else {"stale": stale}
    return await dp_client.put_samples(meta, meta.partition_id, fields=packed, **how, **_limit(timeout_s))


async def kv_first_write(  # noqa: PLR0913 - NeMo-RL's eight, and two that all of these share
    final_batch_cpu: Mapping[str, Any],
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: Mapping[str, Any] | None = None,
    task_name: str = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Tags] | None = None,
    token_aligned_fields: Collection[str] | None = TOKEN_ALIGNED_FIELDS,
    only: Only | None = None,
    timeout_s: float | None = None,
) -> KVBatchMeta:
    """Write a whole rollout batch as new rows, in one put.

    Args:
        final_batch_cpu: ``{name: column}`` as :func:`~asyncdp.batching.padding.pack_jagged_fields` takes them, among
            them ``input_lengths``: tokens per row, integers ``(N,)``. Every column is written.
        sample_ids: The id of each row.
        dp_client: Writes by ``put_samples``.
        partition_id: Where to.
        extra_info: Goes into the returned meta.
        task_name: Goes into the returned meta.
        pad_to_multiple: Above 1, goes into the returned meta's ``extra_info``: what readers round padded widths up to.
        tags: One mapping of small primitives per row. The tag ``input_lengths`` is added where it is missing, so that
            who claims the rows has their lengths.
        token_aligned_fields: The fields with one value per token.
        only: As for ``put_samples``: ``"new"`` refuses ids that live already, which are replaced otherwise.
        timeout_s: As for any verb; None: the client's default.

    Returns:
        The meta of the rows, with fields, sequence_lengths and the tags that were written. Of an empty batch: an empty
        one, as for ``put_samples``.

    Raises:
        DataPlaneBadRequest: No ``input_lengths``, another number of ids or tags than of rows, a column that cannot be
            kept, or an id that lives already where ``only`` is ``"new"``; nothing was written.
        DataPlaneNotReady: The plane is full; nothing was written.
    """
    op = "kv_first_write"
    ids = _names(sample_ids, op, "sample_ids", partition_id)
    if INPUT_LENGTHS not in final_batch_cpu:
        msg = f"{INPUT_LENGTHS!r}: is missing; the batch has {sorted(map(str, final_batch_cpu))}"
        raise DataPlaneBadRequest(msg, op=op, partition_id=partition_id, field=INPUT_LENGTHS)
    valid = row_lengths(final_batch_cpu[INPUT_LENGTHS], op=op, field=INPUT_LENGTHS)
    packed = pack_jagged_fields(final_batch_cpu, lengths=valid, token_aligned_fields=token_aligned_fields)
    lengths: list[int] = valid.tolist()
    for name, given in (("sample_ids", len(ids)), ("tags", len(lengths) if tags is None else len(tags))):
        if given != len(lengths):
            msg = f"{name!r}: has {given} entries for a batch of {len(lengths)} rows"
            raise DataPlaneBadRequest(msg, op=op, partition_id=partition_id, field=name)
    if pad_to_multiple < 1:
        msg = f"'pad_to_multiple': cannot be {pad_to_multiple!r}"
        raise DataPlaneBadRequest(msg, op=op, partition_id=partition_id, field="pad_to_multiple")
    stamped: list[Tags] = [
        {INPUT_LENGTHS: length, **row} for length, row in zip(lengths, tags or [{}] * len(lengths), strict=True)
    ]
    how: dict[str, Any] = {} if only is None else {"only": only}
    written = await dp_client.put_samples(ids, partition_id, fields=packed, tags=stamped, **how, **_limit(timeout_s))
    extras = dict(extra_info or {})
    if pad_to_multiple > 1:
        extras[PAD_TO_MULTIPLE] = int(pad_to_multiple)
    return replace(
        written,
        task_name=task_name,
        fields=[str(name) for name in final_batch_cpu],
        sequence_lengths=lengths,
        extra_info=extras,
        tags=stamped if written.tags is None else written.tags,
    )


def _names(given: Sequence[str], op: str, what: str, partition_id: str) -> list[str]:
    """Take a sequence of names; a lone string would be taken for its letters."""
    if isinstance(given, str):
        msg = f"{what!r}: takes a sequence of names, not {given!r}"
        raise DataPlaneBadRequest(msg, op=op, partition_id=partition_id, field=what)
    return list(given)


def _stamp(meta: KVBatchMeta, key: str, least: int) -> int:
    """Read a number of tokens from extra_info; absent, it is the least one."""
    value = meta.extra_info.get(key, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"{key!r}: extra_info has {value!r}, which is no number of tokens"
        raise DataPlaneBadRequest(msg, op="read_columns", partition_id=meta.partition_id, field=key)
    return value


def _limit(timeout_s: float | None) -> dict[str, Any]:
    """Pass a timeout on only where one is given: a client with the verbs alone may not know it."""
    return {} if timeout_s is None else {"timeout_s": timeout_s}
