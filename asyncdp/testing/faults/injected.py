"""What a fault plan did."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Injected"]


@dataclass(frozen=True, slots=True, repr=False)
class Injected:
    """One fault that happened.

    Attributes:
        kind: Which kind of fault.
        verb, call: The user's verb, and the type of the request that was hit; empty for what happens to a host.
        host, port: Where it went, where it went to a host.
        sample_ids: The samples it was about, as far as the request tells.
        at: Seconds since the first request under the plan.
    """

    kind: str
    verb: str = ""
    call: str = ""
    host: str | None = None
    port: int | None = None
    sample_ids: tuple[str, ...] = ()
    at: float = 0.0

    def __repr__(self) -> str:
        """Show what there is to say; the result can be evaluated."""
        said = [f for f in fields(self) if f.name != "kind" and getattr(self, f.name) not in ("", None, ())]
        return f"Injected({', '.join([repr(self.kind), *(f'{f.name}={getattr(self, f.name)!r}' for f in said)])})"
