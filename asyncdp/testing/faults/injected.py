"""Record of a fault that a plan injected."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Injected"]


@dataclass(frozen=True, slots=True, repr=False)
class Injected:
    """One fault that was injected.

    Attributes:
        kind: Kind of the fault, one of :data:`~asyncdp.testing.faults.rule.KINDS`.
        verb, call: User's verb and type name of the request that was hit; empty for faults of a host.
        host, port: Host id and port number that the request went to; None if it did not go to a host.
        sample_ids: Ids of the samples of the request, as far as known.
        at: Time in seconds since the first request under the plan.
    """

    kind: str
    verb: str = ""
    call: str = ""
    host: str | None = None
    port: int | None = None
    sample_ids: tuple[str, ...] = ()
    at: float = 0.0

    def __repr__(self) -> str:
        """Show the values that differ from defaults, as a constructor call."""
        said = [f for f in fields(self) if f.name != "kind" and getattr(self, f.name) not in ("", None, ())]
        return f"Injected({', '.join([repr(self.kind), *(f'{f.name}={getattr(self, f.name)!r}' for f in said)])})"
