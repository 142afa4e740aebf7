"""Adds up what the roles of a stress run wrote down: nothing lost, nothing twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

__all__ = ["account"]


def account(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return counts, and in words whatever must not be."""
    told: dict[str, Counter[str]] = {}
    for path in folder.glob("*.journal"):
        for line in path.read_text(encoding="utf-8").splitlines():
            what, ids = json.loads(line)
            told.setdefault(what, Counter()).update(ids)
    none: Counter[str] = Counter()
    put, acked, clearing = told.get("put", none), told.get("acked", none), told.get("clearing", none)
    kept = told.get("claimed", none) - told.get("released", none)
    lost = [name for name in acked if not kept[name] and not clearing[name]]
    # Whoever puts an id again may do so after it was popped: then it is claimed again, rightly.
    twice = [name for name, count in kept.items() if count > put[name]]
    gone = [name for name in told.get("gone", none) if not clearing[name]]
    unknown = [name for name in kept if name not in put]
    counts = {
        "rows put": len(put),
        "acknowledged": len(acked),
        "cleared by writers": len(clearing),
        "claimed": kept.total(),
        "released": told.get("released", none).total(),
        "lost": len(lost),
        "claimed twice": len(twice),
        "gone without a clear": len(gone),
    }
    words = {"lost": lost, "claimed twice": twice, "gone, though nobody cleared": gone, "never put": unknown}
    return counts, [f"{what}: {sorted(names)[:5]}" for what, names in words.items() if names]
