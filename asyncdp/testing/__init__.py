"""Test kit: the faults of a data plane, injected by name, in virtual time.

::

    from asyncdp import MemoryTransport
    from asyncdp.testing import FaultPlan, faulty_stack, run_virtual

    async def reads_survive_a_refused_port() -> None:
        plan = FaultPlan(seed=7).on("get_samples").refuse(times=1)
        async with faulty_stack(MemoryTransport(), plan) as client:
            await client.register_partition("train", ["x"], 4, ["trainer"])
            await client.put_samples(["a"], "train", {"x": torch.ones(1, 3)})
            assert (await client.get_samples(["a"], "train", ["x"]))["x"].sum() == 3
        assert plan.counts["refuse"] == 1

    run_virtual(reads_survive_a_refused_port, "trio")

Nothing of the library imports this package.
"""

from asyncdp.testing.clock import VirtualLoop, run_virtual
from asyncdp.testing.effects import On
from asyncdp.testing.faults import Faults
from asyncdp.testing.injected import Injected
from asyncdp.testing.plan import FaultPlan
from asyncdp.testing.rule import KINDS, Rule, Where
from asyncdp.testing.stacks import faulty_stack

__all__ = [
    "KINDS",
    "FaultPlan",
    "Faults",
    "Injected",
    "On",
    "Rule",
    "VirtualLoop",
    "Where",
    "faulty_stack",
    "run_virtual",
]
