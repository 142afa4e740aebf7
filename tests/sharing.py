"""How pytest-xdist shares out the tests: by files; all that is on Ray goes to one process, which then ends."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from tests.order import is_on_ray

__all__ = ["ByFile"]

RAY = "on Ray"


class ByFile(LoadScopeScheduling):
    """Ray starts once, in a process that mostly waits for it; the others share the rest."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return RAY if is_on_ray(path) else path

    def _reschedule(self, node: Any) -> None:
        others = [one for one in self.nodes if one is not node and not one.shutting_down]
        if others and RAY in self.assigned_work[node]:
            if not node.shutting_down:
                node.shutdown()  # when it has run what it has
            return
        super()._reschedule(node)
