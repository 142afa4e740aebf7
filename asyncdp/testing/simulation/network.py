"""The network between clients and the plane: how long, how lossy, and what is broken just now."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from enum import Enum

__all__ = ["Conditions", "DoorState", "Network"]

Door = tuple[str, int | None]


class DoorState(Enum):
    """What is wrong with a port, or with the directory."""

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


@dataclass(frozen=True, slots=True)
class Conditions:
    """The weather of a network.

    Attributes:
        latency_s: Median of the time that a request takes to arrive, in seconds.
        spread: How much it varies: the standard deviation of its logarithm.
        lose_request: How likely a request is lost on its way.
        lose_reply: How likely a reply is lost on its way.
        noticed: How likely whoever sent what was lost notices at once (a reset connection) instead of never.
        duplicate: How likely a request that was answered arrives once more.
        arrives_late: How likely a request whose sender gave up while it was on its way arrives all the same.
        garble: How likely rows are cut off a payload.
    """

    latency_s: float = 0.002
    spread: float = 0.5
    lose_request: float = 0.0
    lose_reply: float = 0.0
    noticed: float = 0.5
    duplicate: float = 0.0
    arrives_late: float = 0.5
    garble: float = 0.0


#: What is left of the weather when the faults have stopped.
CALM = Conditions(arrives_late=1.0)


class Network:
    """The state of the network; changed by whoever makes trouble, asked by every link.

    Args:
        conditions: The weather.
        rng: Source of all its chance.
    """

    def __init__(self, conditions: Conditions, rng: random.Random) -> None:
        """Begin with nothing broken."""
        self.conditions = conditions
        self.rng = rng
        self.doors: dict[Door, DoorState] = {}
        self.slow: dict[Door, float] = {}
        self.cut: set[tuple[str, str]] = set()
        self.faults: Counter[str] = Counter()

    def state(self, host: str, port: int | None) -> DoorState | None:
        """What is wrong with a door."""
        return self.doors.get((host, port))

    def latency_s(self, host: str, port: int | None) -> float:
        """Draw the time that a message takes, in seconds."""
        conditions = self.conditions
        drawn = conditions.latency_s * math.exp(conditions.spread * self.rng.gauss(0.0, 1.0))
        return drawn * self.slow.get((host, port), 1.0) if self.slow else drawn

    def strikes(self, p: float) -> bool:
        """Draw whether something happens."""
        return p > 0.0 and self.rng.random() < p

    def calm_down(self) -> None:
        """End all faults."""
        self.conditions = CALM
        self.doors.clear()
        self.slow.clear()
        self.cut.clear()
