"""Test kit: injects the faults of a data plane by name and runs async tests in virtual time.

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

The library itself never imports this package. Each name is imported on first use, because the package also contains
the pytest plugin, which pytest loads in every run of every project that has asyncdp installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .clock import VirtualLoop as VirtualLoop
    from .clock import run_virtual as run_virtual
    from .faults.effects import On as On
    from .faults.injected import Injected as Injected
    from .faults.layer import Faults as Faults
    from .faults.plan import FaultPlan as FaultPlan
    from .faults.rule import KINDS as KINDS
    from .faults.rule import Rule as Rule
    from .faults.rule import Where as Where
    from .faults.stacks import faulty_stack as faulty_stack
    from .scripted.backend import Backend as Backend
    from .scripted.pair import Pair as Pair
    from .scripted.pair import pair as pair
    from .scripted.request import Request as Request
    from .simulation import Fabric as Fabric
    from .simulation import History as History
    from .simulation import Recorded as Recorded

_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "scripted.backend": ("Backend",),
    "clock": ("VirtualLoop", "run_virtual"),
    "faults.effects": ("On",),
    "faults.layer": ("Faults",),
    "faults.injected": ("Injected",),
    "faults.plan": ("FaultPlan",),
    "scripted.request": ("Request",),
    "faults.rule": ("KINDS", "Rule", "Where"),
    "simulation": ("Fabric", "History", "Recorded"),
    "scripted.pair": ("Pair", "pair"),
    "faults.stacks": ("faulty_stack",),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF)]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    """Load the module of a public name on first use."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'asyncdp.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"asyncdp.testing.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})
