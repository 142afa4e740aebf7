"""One run of a scenario: the workload under faults, a phase without faults, and the final audit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.client import Client

from ..clock import run_virtual
from .checks import check
from .fabric.fabric import Fabric
from .fabric.fault_schedule import run_fault
from .recording.violation import Violation
from .report import Report
from .scenario import ClientPlan, Scenario, draw
from .workload.audit import Audit
from .workload.flow_work import Producer, Scorer, Trainer, Watcher
from .workload.registers_work import Registers
from .workload.worker import FLOW, REGISTERS, TAGS, Values, Worker

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["World", "simulate"]

#: Worker classes by role.
WORKERS: dict[str, type[Worker]] = {kind.role: kind for kind in (Registers, Producer, Scorer, Trainer, Watcher)}
#: Simulated seconds after which a run counts as hung.
LIMIT_S = 4000.0


class World:
    """A fabric whose clients execute the workload of a scenario.

    Args:
        scenario: The scenario to run.
        group: Task group that runs requests whose sender has given up.
        replace: As :class:`~asyncdp.testing.simulation.fabric.fabric.Fabric` takes it.
    """

    def __init__(
        self, scenario: Scenario, group: TaskGroup, replace: Mapping[type[Any], type[Any]] | None = None
    ) -> None:
        """Create the fabric, its clients and their workers."""
        self.scenario = scenario
        self.values = Values()
        lease = {} if scenario.lease_s is None else {"claim_lease_s": scenario.lease_s}
        self.fabric = Fabric(
            group,
            seed=scenario.seed,
            conditions=scenario.conditions,
            config={"num_storage_units": scenario.hosts, **lease, **scenario.config},
            memory=scenario.memory,
            replace=replace,
        )
        if scenario.group_size is not None:
            self.fabric.history.group_sizes[FLOW] = scenario.group_size
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.workers: dict[str, list[Worker]] = {}
        for plan in scenario.clients:
            self.fabric.client(plan.name, layers=plan.layers, budget=plan.budget)
            self.scopes[plan.name] = anyio.CancelScope()
            self.workers[plan.name] = [
                WORKERS[role](
                    self.fabric.recorded(plan.name, tags=TAGS), scenario, self.values, f"{plan.name}.{role}{at}"
                )
                for at, role in enumerate(plan.roles)
            ]

    async def run(self) -> list[Violation]:
        """Run the scenario and return the violations that the final audit found."""
        await self._open()
        async with anyio.create_task_group() as faults:
            for fault in self.scenario.faults:
                faults.start_soon(run_fault, self.fabric, fault, self.scopes.get(fault.target))
            async with anyio.create_task_group() as work:
                for plan in self.scenario.clients:
                    work.start_soon(self._work, plan)
            faults.cancel_scope.cancel()
        self.fabric.calm_down()
        await anyio.sleep(self.scenario.quiet_s)
        self.fabric.history.calm_since = self.fabric.clock.now()
        audit = Audit(self.fabric, self.scenario, self.values)
        for plan in self.scenario.clients:
            if self.fabric.clients[plan.name].alive:
                for worker in self.workers[plan.name]:
                    await worker.finish()
        return await audit.run()

    async def _open(self) -> None:
        """Declare the partitions before the first fault."""
        plane = Client(self.fabric.transport)
        await plane.register_partition(REGISTERS, ["x", "y"], 8, ["nobody"])
        await plane.register_partition(FLOW, ["x", "y"], 100, ["score", "train"], self.scenario.group_size)

    async def _work(self, plan: ClientPlan) -> None:
        with self.scopes[plan.name]:
            async with anyio.create_task_group() as tasks:
                for worker in self.workers[plan.name]:
                    tasks.start_soon(worker.run)


async def _run(scenario: Scenario, report: Report, replace: Mapping[type[Any], type[Any]] | None) -> None:
    async with anyio.create_task_group() as group:
        world = World(scenario, group, replace)
        report.history = world.fabric.history
        try:
            report.violations += await world.run()
        finally:
            report.simulated_s = anyio.current_time()
            report.faults = world.fabric.network.faults
            world.fabric.plane.close()
        group.cancel_scope.cancel()


def simulate(
    seed: int,
    backend: str = "asyncio",
    *,
    steps: int = 60,
    replace: Mapping[type[Any], type[Any]] | None = None,
    scenario: Scenario | None = None,
) -> Report:
    """Run the scenario of a seed and check its history.

    The same seed, backend and number of steps give the same history, event by event.

    Args:
        seed: Seed of the scenario, the scheduling and all random choices.
        backend: ``"asyncio"`` or ``"trio"``.
        steps: Number of steps of each task.
        replace: Replacement classes, see :class:`~asyncdp.testing.simulation.fabric.fabric.Fabric`.
        scenario: Scenario to run instead of the one drawn from the seed.
    """
    from .recording.history import History

    chosen = draw(seed, steps=steps) if scenario is None else scenario
    report = Report(chosen, backend, History())
    before = random.getstate()
    try:
        run_virtual(
            partial(_run, chosen, report, replace),
            backend,
            random.Random(f"{seed}:loop").getrandbits(32),  # noqa: S311
            limit_s=LIMIT_S,
            shuffle=True,
        )
    except TimeoutError:
        report.violations.append(Violation("liveness", f"it did not end within {LIMIT_S:g} simulated seconds"))
    finally:
        random.setstate(before)
    report.operations = report.history.completed
    report.violations += check(report.history)
    return report
