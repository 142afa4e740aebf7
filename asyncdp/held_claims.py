"""The claims that a client was given and has not released, so that a pop by plain ids can say which claims it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from asyncdp.meta import KVBatchMeta
    from asyncdp.settings.verb_arguments import Rows

__all__ = ["HeldClaims"]

#: Number of samples whose claims are remembered; the oldest are forgotten first.
CLAIMS_REMEMBERED: Final = 1 << 20


class HeldClaims:
    """The claims of one client by sample and task, each with the life that was claimed."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        """Start without claims."""
        self._held: dict[tuple[str, str], dict[str, tuple[str, int]]] = {}

    def remember(self, meta: KVBatchMeta) -> None:
        """Add the claims of a claimed meta."""
        if meta.handles is None or meta.task_name is None:
            return
        claims = self._held
        for sample_id, handle in zip(meta.sample_ids, meta.handles, strict=True):
            if handle is not None and handle.claim_id is not None:
                held = claims.setdefault((meta.partition_id, sample_id), {})
                held[meta.task_name] = handle.claim_id, handle.incarnation
        while len(claims) > CLAIMS_REMEMBERED:
            del claims[next(iter(claims))]

    def of(self, named: Rows, ids: Sequence[str], partition_id: str) -> tuple[tuple[str, ...] | None, ...] | None:
        """Return the claims to check for a pop: those of its meta, else those that this client holds."""
        claims: list[tuple[str, ...] | None]
        if named.handles is not None and not named.is_group:
            claims = [(h.claim_id,) if h and h.claim_id else None for h in named.handles]
        else:
            lives = named.lives or (None,) * len(ids)
            claims = []
            for sample_id, life in zip(ids, lives, strict=True):
                held = self._held.get((partition_id, sample_id), {}).values()
                claims.append(tuple(claim for claim, claimed in held if life in (None, claimed)) or None)
        return tuple(claims) if any(claims) else None

    def released(self, partition_id: str, ids: Sequence[str], task: str) -> None:
        """Forget the claims of one task that were released."""
        for sample_id in ids:
            self._held.get((partition_id, sample_id), {}).pop(task, None)

    def forget(self, partition_id: str, ids: Sequence[str] | None, lives: Sequence[int | None] | None = None) -> None:
        """Forget the claims of removed samples; ``ids`` None: of the whole partition."""
        if ids is None:
            for key in [key for key in self._held if key[0] == partition_id]:
                del self._held[key]
            return
        for sample_id, life in zip(ids, lives or (None,) * len(ids), strict=True):
            held = self._held.pop((partition_id, sample_id), {})
            others = {task: claim for task, claim in held.items() if life not in (None, claim[1])}
            if others:
                self._held[partition_id, sample_id] = others
