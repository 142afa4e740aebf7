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

from asyncdp.testing.simulation.checks import CHECKS, check
from asyncdp.testing.simulation.fabric import Fabric, Simulated
from asyncdp.testing.simulation.history import Budgets, Event, History, Lost
from asyncdp.testing.simulation.network import Conditions, DoorState, Network
from asyncdp.testing.simulation.operation import Operation
from asyncdp.testing.simulation.recorded import Recorded
from asyncdp.testing.simulation.report import Report
from asyncdp.testing.simulation.scenario import Scenario, draw
from asyncdp.testing.simulation.trouble import Trouble
from asyncdp.testing.simulation.violation import Violation
from asyncdp.testing.simulation.wire_request import WireRequest
from asyncdp.testing.simulation.world import simulate

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
