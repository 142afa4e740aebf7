"""Counts the payload bytes that a client has in the plane, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["LiveBytes", "leaf_nbytes", "sizes_of"]


def leaf_nbytes(leaf: Any) -> int:
    """Return the payload bytes of one leaf; text and bytes count by their length, other non-tensor values 8 each."""
    if isinstance(leaf, torch.Tensor):
        values = vars(leaf).get("_values")  # of a jagged tensor; values() takes 70 us for autograd
        if isinstance(values, torch.Tensor):
            return values.nbytes
        return leaf.values().nbytes if leaf.is_nested and leaf.layout == torch.jagged else leaf.nbytes
    rows = leaf.tolist() if hasattr(leaf, "tolist") else leaf
    values = rows if isinstance(rows, (list, tuple)) else [rows]
    return sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in values)


def sizes_of(fields: Mapping[str, Any] | TensorDictBase | None) -> dict[str, int]:
    """Return the payload bytes of each field."""
    return {} if fields is None else {str(name): leaf_nbytes(leaf) for name, leaf in fields.items()}


#: A key's incarnation, None where it is not known; its bytes by field, which keys of one put share; and their sum.
_Held = tuple[int | None, Mapping[str, int], int]
_NOTHING: Final[_Held] = (None, {}, 0)


class LiveBytes:
    """Counts live bytes by partition, key and field, from the puts and removals of this client.

    The bytes of a put are divided evenly over its keys; the first key gets the remainder. A field that is put again
    replaces its former bytes. A key that is put in another incarnation loses the bytes of the former one.
    """

    __slots__ = ("_held", "last_put_bytes_per_key", "max_bytes_per_key_seen", "outstanding", "peak")

    def __init__(self) -> None:
        """Start with no keys."""
        self._held: dict[str, dict[str, _Held]] = {}
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
            if written is not None and key not in written:
                continue
            known = None if written is None else written[key]
            life, mine, before = held.get(key, _NOTHING)
            if known is not None and life not in (None, known):  # a former life's bytes are gone
                self.outstanding -= before
                mine, before = {}, 0
            now: Mapping[str, int] = even
            after = share
            if first is None:
                now, after = mine, before
            elif mine or rest:
                now = {**mine, **even, first: even[first] + rest}
                after = sum(now.values())
            held[key] = life if known is None else known, now, after
            entered += share + rest
            rest = 0
            self.outstanding += after - before
            self.max_bytes_per_key_seen = max(self.max_bytes_per_key_seen, after)
        if sizes:
            self.last_put_bytes_per_key = share
        self.peak = max(self.peak, self.outstanding)
        return entered

    def clear(self, partition_id: str, keys: Sequence[str] | None, lives: Sequence[int | None] | None = None) -> int:
        """Subtract removed keys (None: all of the partition); return how many were named.

        ``lives`` has the incarnation of each removed key, None for any; a key that has another one stays.
        """
        held = self._held.get(partition_id, {})
        named = list(held) if keys is None else keys
        for key, life in zip(named, lives or (None,) * len(named), strict=True):
            known, _, nbytes = held.get(key, _NOTHING)
            if life is None or known in (None, life):
                held.pop(key, None)
                self.outstanding -= nbytes
        return len(named)

    def by_partition(self) -> dict[str, int]:
        """Return the live bytes of each partition that has keys."""
        return {name: sum(nbytes for _, _, nbytes in held.values()) for name, held in self._held.items() if held}

    def keys(self) -> int:
        """Return the number of keys."""
        return sum(map(len, self._held.values()))
