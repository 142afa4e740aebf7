"""The end of borrows, for code that cannot wait until the last tensor is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from asyncdp.process.private_mapping import PrivateMapping, mapping_at

from .pack import field_names, raw_leaf

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["borrowed"]


@contextmanager
def borrowed(data: TensorDict) -> Iterator[TensorDict]:
    """Give back what ``data`` borrows when the context is left, even if tensors or slices of it are still referred to.

    From then on such tensors hold zeros: never another sample's bytes. Without this context a borrow ends when the last
    of them is gone, which is soon enough unless something else keeps them, such as a cycle of references or a graph of
    autograd. What is not borrowed stays as it is::

        with asyncdp.borrowed(await client.get_data(meta, borrow=True)) as data:
            train(data)

    Args:
        data: What ``get_data``, ``get_samples`` or ``batches`` returned; any other TensorDict will do.
    """
    mappings = _mappings(data)
    try:
        yield data
    finally:
        for mapping in mappings:
            mapping.end()


def _mappings(data: TensorDict) -> set[PrivateMapping]:
    """Return the mappings on which tensors of ``data`` are."""
    found = set()
    for name in field_names(data):
        leaf = raw_leaf(data, name)
        if isinstance(leaf, torch.Tensor):
            values = leaf.values() if leaf.is_nested else leaf
            found.add(mapping_at(values.untyped_storage().data_ptr()))
    return {mapping for mapping in found if mapping is not None}
