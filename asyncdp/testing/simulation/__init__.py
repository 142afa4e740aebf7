"""Deterministic simulation of a plane with its clients and network, and checks of the recorded history.

One seed determines a plane, its clients and their stacks, the network between them, the faults and their times, and the
workload; :func:`simulate` runs it in virtual time and checks the history::

    report = simulate(seed=7)
    assert not report.violations, report.describe()

``python -m asyncdp.testing.simulate --seconds 60`` runs many seeds on all cores. To write a simulation of your own, use
:class:`Fabric`. To check the behaviour of a real plane under any faults, use :class:`Recorded` and :func:`check`::

    history = History()
    alice = Recorded(client, history, "alice")
    await alice.put_samples(["a"], "train", {"x": torch.tensor([1])})   # unique values
    await alice.get_samples(["a"], "train", ["x"])
    assert check(history) == []
"""

from __future__ import annotations

import warnings
from typing import Any

from .checks import CHECKS, check
from .fabric.fabric import Fabric, Simulated
from .fabric.fault_schedule import ScheduledFault
from .fabric.network import Conditions, Network, PortState
from .recording.history import Budgets, Event, History, Lost
from .recording.operation import Operation
from .recording.recorded import Recorded
from .recording.violation import Violation
from .recording.wire_request import WireRequest
from .report import Report
from .scenario import Scenario, draw
from .world import simulate

__all__ = [
    "CHECKS",
    "Budgets",
    "Conditions",
    "Event",
    "Fabric",
    "History",
    "Lost",
    "Network",
    "Operation",
    "PortState",
    "Recorded",
    "Report",
    "Scenario",
    "ScheduledFault",
    "Simulated",
    "Violation",
    "WireRequest",
    "check",
    "draw",
    "simulate",
]

#: Names of the version before, which are kept for one version.
_RENAMED = {"DoorState": PortState, "Trouble": ScheduledFault}


def __getattr__(name: str) -> Any:
    """Return what has another name now."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = _RENAMED[name]
    text = f"{__name__}.{name} is kept for one version: it is {now.__name__}"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return now
