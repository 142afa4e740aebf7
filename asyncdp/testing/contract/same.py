"""Comparison of leaves by type, dtype, layout, shape and every bit."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_same", "jagged", "rows_of"]


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    """Return a jagged tensor of these rows."""
    nested: torch.Tensor = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    return nested


def rows_of(leaf: Any) -> list[Any]:
    """Return the rows of a leaf as a list of tensors or objects."""
    if isinstance(leaf, torch.Tensor):
        return list(leaf.unbind())
    rows: list[Any] = leaf.tolist() if hasattr(leaf, "tolist") else list(leaf)
    return rows


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def check_same(got: Any, wanted: Any) -> None:
    """Fail unless ``got`` equals the put leaf ``wanted``."""
    if not isinstance(wanted, torch.Tensor):
        assert not isinstance(got, torch.Tensor), f"a tensor {got.shape} came for objects"
        there, right = rows_of(got), rows_of(wanted)
        assert there == right
        assert [type(v) for v in there] == [type(v) for v in right]
        return
    assert isinstance(got, torch.Tensor)
    assert got.dtype == wanted.dtype
    assert got.is_nested == wanted.is_nested
    assert not got.requires_grad
    if wanted.is_nested:
        assert got.layout == torch.jagged
        pairs = list(zip(rows_of(got), rows_of(wanted), strict=True))
    else:
        pairs = [(got, wanted)]
    for one, other in pairs:
        assert one.shape == other.shape
        assert _bits(one) == _bits(other), f"{one} came for {other}"
