"""The batches that benchmarks put and read, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from tensordict import TensorDict

__all__ = ["LAYOUTS", "bytes_of"]

KIB, MIB = 1 << 10, 1 << 20


def _dense(n: int, size: int) -> TensorDict:
    """Rows of one field, which lie in one tensor."""
    return TensorDict({"x": torch.ones(n, size // 4)}, [n])


def _grpo(n: int) -> TensorDict:
    """A batch of GRPO: prompt and response of 64 to 2,048 tokens, and what belongs to each token or sample."""
    lengths = torch.randint(64, 2049, (n,), generator=torch.Generator().manual_seed(0)).tolist()

    def ragged(dtype: torch.dtype) -> torch.Tensor:
        rows = [torch.ones(length, dtype=dtype) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    fields = {"input_ids": ragged(torch.int64), "token_mask": ragged(torch.bool), "logprobs": ragged(torch.float32)}
    return TensorDict({**fields, "reward": torch.ones(n)}, [n])


LAYOUTS: Final[dict[str, Callable[[], TensorDict]]] = {
    "1 x 1 KiB": lambda: _dense(1, KIB),
    "64 x 8 KiB": lambda: _dense(64, 8 * KIB),
    "1 x 64 KiB": lambda: _dense(1, 64 * KIB),
    "8 x 64 KiB": lambda: _dense(8, 64 * KIB),
    "256 x 4 KiB": lambda: _dense(256, 4 * KIB),
    "256 x 64 KiB": lambda: _dense(256, 64 * KIB),
    "256 x 1 MiB": lambda: _dense(256, MIB),
    "32 x 16 MiB": lambda: _dense(32, 16 * MIB),
    "GRPO, 16 rows": lambda: _grpo(16),
    "GRPO, 1,024 rows": lambda: _grpo(1024),
}


def bytes_of(fields: TensorDict) -> int:
    """Return how many bytes its values are."""
    return sum((value.values() if value.is_nested else value).nbytes for value in fields.values())
