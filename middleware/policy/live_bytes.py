"""Counts the payload bytes that a client has in the plane, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["LiveBytes", "leaf_nbytes", "sizes_of"]


def leaf_nbytes(leaf: Any) -> int:
    """Return the payload bytes of one leaf; text and bytes count by their length, other non-tensor values 8 each."""
    if isinstance(leaf, torch.Tensor):
        return leaf.values().nbytes if leaf.is_nested and leaf.layout == torch.jagged else leaf.nbytes
    rows = leaf.tolist() if hasattr(leaf, "tolist") else leaf
    values = rows if isinstance(rows, (list, tuple)) else [rows]
    return sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in values)


def sizes_of(fields: Mapping[str, Any] | TensorDictBase | None) -> dict[str, int]:
    """Return the payload bytes of each field."""
    return {} if fields is None else {str(name): leaf_nbytes(leaf) for name, leaf in fields.items()}


class LiveBytes:
    """Counts live bytes by partition, key and field, from the puts and removals of this client.

    The bytes of a put are divided evenly over its keys; the first key gets the remainder. A field that is put again
    replaces its former bytes. A key that is put in another incarnation loses the bytes of the former one.
    """

    __slots__ = ("_held", "_lives", "last_put_bytes_per_key", "max_bytes_per_key_seen", "outstanding", "peak")

    def __init__(self) -> None:
        """Start with no keys."""
        self._held: dict[str, dict[str, dict[str, int]]] = {}
        self._lives: dict[tuple[str, str], int] = {}
        self.outstanding = self.peak = self.max_bytes_per_key_seen = self.last_put_bytes_per_key = 0

    def put(
        self,
        partition_id: str,
        keys: Sequence[str],
        fields: Mapping[str, Any] | TensorDictBase | None,
        written: Mapping[str, int | None] | None = None,
    ) -> int:
        """Count a put and return its bytes; ``written`` is as in :meth:`put_sizes`."""
        return self.put_sizes(partition_id, keys, sizes_of(fields), written)

    def put_sizes(
        self,
        partition_id: str,
        keys: Sequence[str],
        sizes: Mapping[str, int],
        written: Mapping[str, int | None] | None = None,
    ) -> int:
        """Count a put of fields with these sizes in bytes, and return their sum.

        ``written`` maps the keys that were written to their incarnations, None where not known; default: all keys.
        """
        share, rest = divmod(sum(sizes.values()), len(keys))
        # Stored by field, so that one of them can be replaced; they add up to the key's even share.
        even = {name: size // len(keys) for name, size in sizes.items()}
        first = next(iter(even), None)
        if first is not None:
            even[first] += share - sum(even.values())
        held = self._held.setdefault(partition_id, {})
        entered = 0
        for key in keys:
            if written is not None:
                if key not in written:
                    continue
                self._begin(partition_id, key, written[key])
            mine = held.setdefault(key, {})
            if first is not None:
                before = sum(mine.values())
                mine.update(even)
                mine[first] += rest
                after = sum(mine.values())
                entered += share + rest
                rest = 0
                self.outstanding += after - before
                self.max_bytes_per_key_seen = max(self.max_bytes_per_key_seen, after)
        if sizes:
            self.last_put_bytes_per_key = share
        self.peak = max(self.peak, self.outstanding)
        return entered

    def _begin(self, partition_id: str, key: str, life: int | None) -> None:
        """Forget the bytes of a former life of a key."""
        if life is not None and self._lives.setdefault((partition_id, key), life) != life:
            self.clear(partition_id, (key,))
            self._lives[partition_id, key] = life

    def clear(self, partition_id: str, keys: Sequence[str] | None, lives: Sequence[int | None] | None = None) -> int:
        """Subtract removed keys (None: all of the partition); return how many were named.

        ``lives`` has the incarnation of each removed key, None for any; a key that has another one stays.
        """
        held = self._held.get(partition_id, {})
        named = list(held) if keys is None else keys
        for key, life in zip(named, lives or (None,) * len(named), strict=True):
            at = (partition_id, key)
            if life is None or self._lives.get(at, life) == life:
                self._lives.pop(at, None)
                self.outstanding -= sum(held.pop(key, {}).values())
        return len(named)

    def by_partition(self) -> dict[str, int]:
        """Return the live bytes of each partition that has keys."""
        return {name: sum(sum(put.values()) for put in held.values()) for name, held in self._held.items() if held}

    def keys(self) -> int:
        """Return the number of keys."""
        return sum(map(len, self._held.values()))
