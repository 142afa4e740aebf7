"""The faults that the tests of the contract place between a transport and its default layers.

Each is passed to ``rig.attach`` or ``rig.open``; see :mod:`asyncdp.testing.faults.fault`. Backends get either whole
verbs or slot calls: ``PUT``, ``GET``, ``CLAIM`` and ``CLEAR`` contain the deciding call of both kinds.
"""

from __future__ import annotations

from asyncdp.calls import ClearSamples, EvictSamples, PopSamples

from ..faults.fault import Delay, Fail, Fault, Hold, LoseReply, LoseRequest, Straggle, Tamper, Watch
from ..verbs import VERBS

__all__ = [
    "CLAIM",
    "CLEAR",
    "GET",
    "PUT",
    "Delay",
    "Fail",
    "Fault",
    "Hold",
    "LoseReply",
    "LoseRequest",
    "Straggle",
    "Tamper",
    "Watch",
]

PUT = VERBS["put_samples"].decided_by
GET = VERBS["get_samples"].decided_by
CLAIM = VERBS["claim_meta"].decided_by
CLEAR = (ClearSamples, PopSamples, EvictSamples)
