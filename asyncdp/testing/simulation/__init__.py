"""Deterministic simulation of a plane with its clients and network, and checks of the recorded history.

One seed determines a plane, its clients and their stacks, the network between them, the faults and their times, and the
workload; :func:`simulate` runs it in virtual time and checks the history::

    report = simulate(seed=7)
    assert not report.violations, report.told()

``python -m asyncdp.testing.simulate --seconds 60`` runs many seeds on all cores. To write a simulation of your own, use
:class:`Fabric`. To check the behaviour of a real plane under any faults, use :class:`Recorded` and :func:`check`::

    history = History()
    alice = Recorded(client, history, "alice")
    await alice.put_samples(["a"], "train", {"x": torch.tensor([1])})   # unique values
    await alice.get_samples(["a"], "train", ["x"])
    assert check(history) == []
"""

from __future__ import annotations

from .checks import CHECKS, check
from .fabric import Fabric, Simulated
from .fault_schedule import Trouble
from .history import Budgets, Event, History, Lost
from .network import Conditions, DoorState, Network
from .operation import Operation
from .recorded import Recorded
from .report import Report
from .scenario import Scenario, draw
from .violation import Violation
from .wire_request import WireRequest
from .world import simulate

__all__ = [
    "CHECKS",
    "Budgets",
    "Conditions",
    "DoorState",
    "Event",
    "Fabric",
    "History",
    "Lost",
    "Network",
    "Operation",
    "Recorded",
    "Report",
    "Scenario",
    "Simulated",
    "Trouble",
    "Violation",
    "WireRequest",
    "check",
    "draw",
    "simulate",
]
