"""Report of one simulated run."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recording.history import History
    from .recording.violation import Violation
    from .scenario import Scenario

__all__ = ["Report"]

#: Maximum number of lines of a trace: half of them from its beginning, half from its end.
SHOWN = 60


@dataclass(slots=True)
class Report:
    """Result of one simulated run.

    Attributes:
        scenario: The scenario that was run.
        backend: Name of the event loop.
        history: Recorded history of the run.
        operations: Number of user calls that returned.
        simulated_s: Duration in simulated seconds.
        faults: Number of faults by kind.
        violations: The violated promises; empty if all hold.
    """

    scenario: Scenario
    backend: str
    history: History
    operations: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    @property
    def command(self) -> str:
        """Shell command that repeats this run."""
        steps = f" --steps {self.scenario.steps}"
        return f"python -m asyncdp.testing.simulate --once --seed {self.scenario.seed} --backend {self.backend}{steps}"

    def trace(self, violation: Violation) -> list[str]:
        """Return the calls on the samples of a violation in order, one per line; a long trace is cut in the middle."""
        marked = {op.number for op in violation.operations}
        ids = list(violation.ids)
        about = list(self.history.of(violation.partition, ids)) if ids else list(violation.operations)
        ops = {op.number: op for op in (*about, *violation.operations)}
        lines = [f"{'*' if number in marked else ' '} {ops[number]}" for number in sorted(ops)]
        if len(lines) > SHOWN:
            kept = [line for line in lines[SHOWN // 2 : -SHOWN // 2] if line.startswith("*")]
            lines = [*lines[: SHOWN // 2], "  ...", *kept, "  ...", *lines[-SHOWN // 2 :]]
        return lines

    def describe(self) -> list[str]:
        """Describe the violations, how to repeat the run, and the trace that led to them."""
        lines = []
        for violation in self.violations[:5]:
            lines += [f"VIOLATION {violation}", f"  repeat: {self.command}", *self.trace(violation)]
        if len(self.violations) > 5:  # noqa: PLR2004 - the first tell most
            lines.append(f"and {len(self.violations) - 5} more violations")
        if self.violations:
            lines.append("scheduled faults:")
            lines += [f"  {fault}" for fault in self.scenario.faults]
        return lines

    def told(self) -> list[str]:
        """Return :meth:`describe`, whose name it had; kept for one version."""
        warnings.warn("Report.told() is kept for one version: it is describe()", DeprecationWarning, stacklevel=2)
        return self.describe()
