"""A simulated fabric, and checks of what happened in it.

One seed makes a plane, its clients and their stacks, the network between them, what goes wrong and when, and the work
that is done; :func:`simulate` runs it in virtual time and checks the history::

    report = simulate(seed=7)
    assert not report.violations, report.told()

The same on all cores: ``python -m asyncdp.testing.simulate --seconds 60``. For a simulation of your own there is
:class:`Fabric`; for checking what your own plane did, under whatever faults, :class:`Recorded` and :func:`check`::

    history = History()
    alice = Recorded(client, history, "alice")
    await alice.put_samples(["a"], "train", {"x": torch.tensor([1])})   # values that no other row has
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
