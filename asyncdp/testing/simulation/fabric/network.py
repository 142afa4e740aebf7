"""The simulated network between clients and the plane: latency, loss, and the present faults."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from ...faults.rule import Rule

__all__ = ["Conditions", "Network", "PortState"]

Port = tuple[str, int | None]


class PortState(Enum):
    """Fault of a port or of the directory."""

    REFUSES = "refuses"
    """Connections are refused at once."""
    SILENT = "silent"
    """It accepts requests, does nothing and never answers."""
    MUTE = "mute"
    """It does what it is asked and never answers."""
    RESETS = "resets"
    """It breaks connections before it does anything."""
    GARBLES = "garbles"
    """It cuts rows off the payload that it sends."""


#: What requests meet at a port in each state, as rules of a fault plan.
RULES = {
    PortState.REFUSES: Rule("refuse"),
    PortState.SILENT: Rule("silent"),
    PortState.MUTE: Rule("lose_reply"),
    PortState.RESETS: Rule("reset"),
    PortState.GARBLES: Rule("truncate"),
}
#: What requests meet between a client and a host that is cut off from it.
CUT = Rule("silent")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Latency and fault probabilities of a network.

    Attributes:
        latency_s: Median latency of a request in seconds.
        spread: Standard deviation of the logarithm of the latency.
        lose_request: Probability that a request is lost.
        lose_reply: Probability that a reply is lost.
        noticed: Probability that the sender notices a loss at once (connection reset) instead of never.
        duplicate: Probability that an answered request arrives a second time.
        arrives_late: Probability that a request in transit still arrives after its sender gave up.
        garble: Probability that rows are cut off a payload.
    """

    latency_s: float = 0.002
    spread: float = 0.5
    lose_request: float = 0.0
    lose_reply: float = 0.0
    noticed: float = 0.5
    duplicate: float = 0.0
    arrives_late: float = 0.5
    garble: float = 0.0


#: Conditions after the faults have ended.
CALM = Conditions(arrives_late=1.0)


class Network:
    """The state of the network, which scheduled faults change and all links use.

    Args:
        conditions: Latency and fault probabilities.
        rng: Random source.
    """

    def __init__(self, conditions: Conditions, rng: random.Random) -> None:
        """Start without faults."""
        self.conditions = conditions
        self.rng = rng
        self.ports: dict[Port, PortState] = {}
        self.slow: dict[Port, float] = {}
        self.cut: set[tuple[str, str]] = set()
        self.faults: Counter[str] = Counter()

    def state(self, host: str, port: int | None) -> PortState | None:
        """Return the fault of a port (None: of the directory); None if it works."""
        return self.ports.get((host, port))

    def latency_s(self, host: str, port: int | None) -> float:
        """Draw the latency of a message in seconds."""
        conditions = self.conditions
        drawn = conditions.latency_s * math.exp(conditions.spread * self.rng.gauss(0.0, 1.0))
        return drawn * self.slow.get((host, port), 1.0) if self.slow else drawn

    def strikes(self, p: float) -> bool:
        """Draw whether an event of probability ``p`` happens."""
        return p > 0.0 and self.rng.random() < p

    def happens(self, what: str, p: float) -> bool:
        """Draw whether a fault of probability ``p`` happens, and count it."""
        return self.strikes(p) and self.count(what)

    def count(self, what: str) -> bool:
        """Count a fault; return True."""
        self.faults[what] += 1
        return True

    def loss(self) -> Exception | None:
        """Return what the sender notices of a loss: a connection reset, or (None) nothing."""
        return RULES[PortState.RESETS].make_error() if self.strikes(self.conditions.noticed) else None

    def calm_down(self) -> None:
        """End all faults."""
        self.conditions = CALM
        self.ports.clear()
        self.slow.clear()
        self.cut.clear()
