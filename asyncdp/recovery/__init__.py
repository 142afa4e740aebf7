"""What a SingleController needs to outlive faults of the plane, and its own. It works on metadata and sees no tensor.

- :class:`CapacityLedger`: how many rollout groups may be made or wait at once; counted anew after a restart.
- :class:`Selector`: which groups to train on next, and which ones can never be.
- :class:`RecoveryLoop`: waits out an outage and puts the partition in order, then opens the gate again.
- :class:`GroupWriter`: for rollout workers: a group is written as a whole, or nothing of it is left.

docs/recovery.md has the diagram of the loop, and a table of what died and what comes back.
"""

from .gate import Gate
from .group_writer import GroupWriter
from .ledger import CapacityLedger
from .loop import RecoveryGaveUp, RecoveryLoop, is_outage
from .machine import RecoveryMachine, RecoveryStep
from .places import Places
from .reservations import Reservation
from .selection import Selection, Selector, Verdict

__all__ = [
    "CapacityLedger",
    "Gate",
    "GroupWriter",
    "Places",
    "RecoveryGaveUp",
    "RecoveryLoop",
    "RecoveryMachine",
    "RecoveryStep",
    "Reservation",
    "Selection",
    "Selector",
    "Verdict",
    "is_outage",
]
