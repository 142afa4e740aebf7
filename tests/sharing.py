"""How pytest-xdist shares out the tests: by files; all that is on Ray goes to one process, which then ends.

Where the whole of tests/ is run, that process collects nothing else, and the others do not collect what is on Ray.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from xdist.scheduler import LoadScopeScheduling

from tests.order import RAY, is_on_ray

__all__ = ["ByFile"]


class ByFile(LoadScopeScheduling):
    """Ray starts once, in a process that mostly waits for it; the others share the rest."""

    def add_node_collection(self, node: Any, collection: Any) -> None:
        """Take what a process collected: its share, or everything, as one does that replaces another."""
        self.registered_collections[node] = list(collection)

    def schedule(self) -> None:
        """Share out what all processes together collected, in the order in which they did."""
        if self.collection is None:
            self.collection = list(dict.fromkeys(chain.from_iterable(self.registered_collections.values())))
            self.config.pluginmanager.getplugin("session").testscollected = len(self.collection)
            for nodeid in self.collection:
                self.workqueue.setdefault(self._split_scope(nodeid), {})[nodeid] = False
            for node in self.nodes:
                self._reschedule(node)
        for node in self.nodes:  # once more: a process that has one test alone waits for the next before it begins
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Give what a process had to others, but for the test that ended it, which would end them too."""
        left = self.assigned_work.pop(node)
        crashed = next((test for unit in left.values() for test, done in unit.items() if not done), None)
        for scope, unit in left.items():
            if crashed in unit:
                unit[crashed] = True
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return RAY if is_on_ray(path) else path

    def _reschedule(self, node: Any) -> None:
        if node.shutting_down or node not in self.registered_collections:
            return
        share = node.workerinput["share"]
        fits = (scope for scope in self.workqueue if share is None or (scope == RAY) == (share == RAY))
        scope = next(fits, None)
        alone = all(other is node or other.shutting_down for other in self.nodes)
        if scope is None or (RAY in self.assigned_work[node] and not alone):
            node.shutdown()  # when it has run what it has
        elif self._pending_of(self.assigned_work[node]) <= 2:
            self.workqueue.move_to_end(scope, last=False)
            self._assign_work_unit(node)
