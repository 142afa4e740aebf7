"""Read and write named columns of a batch that a :class:`~asyncdp.meta.KVBatchMeta` names.

The functions combine :mod:`asyncdp.batching.padding` with ``get_samples``, ``get_data`` and ``put_samples``. Names,
arguments and meaning are those of NeMo-RL (``nemo_rl/data_plane/column_io.py``), with ``await`` and plain dicts.
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
    "TOKEN_ALIGNED_FIELDS",
    "kv_first_write",
    "read_columns",
    "write_columns",
]

# Keys of extra_info: the width in tokens to which all ranks pad, and the multiple to which the width is rounded up.
GLOBAL_FORWARD_PAD_SEQLEN: Final = "global_forward_pad_seqlen"
PAD_TO_MULTIPLE: Final = "pad_to_multiple"
# Name of the column and of the tag with the tokens per row; a claim copies the tag to KVBatchMeta.sequence_lengths.
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

    Padded fields have the width ``meta.extra_info["global_forward_pad_seqlen"]`` if a driver has set it, so that all
    ranks get the same width; else that of their longest row, rounded up to ``meta.extra_info["pad_to_multiple"]``.

    Args:
        dp_client: Client to read with: by ``get_data`` if the meta has handles, so that a row that was removed and put
            anew is not mistaken for the earlier one, else by ``get_samples``.
        meta: The rows to read.
        select_fields: Names of the fields; if empty, the result is ``{}`` and nothing is requested.
        layout: ``"padded"`` or ``"jagged"``.
        pad_value_dict: ``{field: padding value}``; 0 for other fields.
        token_aligned_fields: Names of rectangular fields that are padded as well.
        timeout_s: Seconds that the call may take; None: the client's default.

    Returns:
        ``{field: column}`` of ``meta.size`` rows, see :func:`~asyncdp.batching.padding.materialize`.

    Raises:
        DataPlaneBadRequest: ``materialize`` refuses a column, or a width in ``extra_info`` is invalid.
        SampleNotFound, StaleSlotError, PartialReadError: As the client's verbs raise them.
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
        dp_client: Client to write with, by ``put_samples``.
        meta: The rows to write. Its ``sequence_lengths`` are the lengths without padding of token-aligned fields; if it
            has none, every field is written as it is.
        fields: ``{name: column}``, as for :func:`~asyncdp.batching.padding.pack_jagged_fields`; if empty, nothing is
            requested.
        token_aligned_fields: Names of the fields with one value per token.
        stale: With rows that were removed, or removed and put anew, since the meta was made, ``"raise"`` writes nothing
            and raises; ``"skip"`` writes the other rows.
        timeout_s: Seconds that the call may take; None: the client's default.

    Returns:
        The meta of the rows that were written, as ``put_samples`` returns it; ``meta`` itself if there are no fields.

    Raises:
        StaleSlotError: Rows are stale; the error's ``sample_ids`` names them. Nothing was written.
        DataPlaneBadRequest: A column cannot be stored unchanged, or has not ``meta.size`` rows; nothing was written.
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
        final_batch_cpu: ``{name: column}``, as for :func:`~asyncdp.batching.padding.pack_jagged_fields`, including
            ``input_lengths``: tokens per row, integers of shape ``(N,)``. Every column is written.
        sample_ids: Id of each row.
        dp_client: Client to write with, by ``put_samples``.
        partition_id: Partition to write to.
        extra_info: ``extra_info`` of the returned meta.
        task_name: ``task_name`` of the returned meta.
        pad_to_multiple: If above 1, stored in the returned meta's ``extra_info``; readers round padded widths up to a
            multiple of it.
        tags: One mapping of small primitives per row. The tag ``input_lengths`` is added if it is missing, so that a
            claim of the rows returns their lengths.
        token_aligned_fields: Names of the fields with one value per token.
        only: As for ``put_samples``: with ``"new"``, ids that exist are refused; otherwise their rows are updated.
        timeout_s: Seconds that the call may take; None: the client's default.

    Returns:
        The meta of the rows, with fields, sequence_lengths and the tags that were written; empty for an empty batch.

    Raises:
        DataPlaneBadRequest: ``input_lengths`` is missing, the number of ids or tags is not that of rows, a column
            cannot be stored unchanged, or an id exists and ``only`` is ``"new"``; nothing was written.
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
            msg = f"{name!r}: {given} entries must match batch size {len(lengths)}"
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
    """Check a sequence of names; refuse a lone string, which would be read as a sequence of letters."""
    if isinstance(given, str):
        msg = f"{what!r}: takes a sequence of names, not {given!r}"
        raise DataPlaneBadRequest(msg, op=op, partition_id=partition_id, field=what)
    return list(given)


def _stamp(meta: KVBatchMeta, key: str, least: int) -> int:
    """Return a number of tokens from extra_info, or ``least`` if it is absent."""
    value = meta.extra_info.get(key, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"{key!r}: extra_info has {value!r}, which is no number of tokens"
        raise DataPlaneBadRequest(msg, op="read_columns", partition_id=meta.partition_id, field=key)
    return value


def _limit(timeout_s: float | None) -> dict[str, Any]:
    """Return ``timeout_s`` as keyword arguments, none for None: clients of other projects may not accept it."""
    return {} if timeout_s is None else {"timeout_s": timeout_s}
