"""Memory and descriptors of processes over time: flat, or growing."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

__all__ = ["Gauge"]

MIB = 1 << 20
#: Samples, one a second, after which a process is warm. A run of less than twice as many is too short to tell.
WARM_SAMPLES = 20
#: What it may grow by afterwards: buffers of new sizes, the allocator's own, one more connection.
GROWN_BYTES = 12 * MIB
GROWN_DESCRIPTORS = 6
#: In runs of any length: more than all connections to all ports take.
MOST_DESCRIPTORS = 200


class Gauge:
    """Samples of one process.

    Args:
        name: In the report.
        pid: Of the process.
        bounded: Whether its memory has to be flat; the directory remembers every op_id for minutes.
    """

    def __init__(self, name: str, pid: int, *, bounded: bool = True) -> None:
        self.name = name
        self.pid = pid
        self.bounded = bounded
        self.rss: list[int] = []
        self.descriptors: list[int] = []

    def sample(self) -> None:
        """Take one; the memory is what is the process's own, without the arenas that it maps."""
        fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()
        self.rss.append((int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir()))

    def _levels(self, samples: list[int]) -> tuple[float, float]:
        """The level once everybody was warm, and that at the end: medians of a third of the samples each."""
        warm = samples[WARM_SAMPLES:] if self.steady else samples
        third = max(1, len(warm) // 3)
        return (statistics.median(warm[:third]), statistics.median(warm[-third:])) if warm else (0.0, 0.0)

    @property
    def steady(self) -> bool:
        """Whether there are enough samples to call a growth one: at first connections are made and buffers filled."""
        return len(self.rss) >= 2 * WARM_SAMPLES

    @property
    def row(self) -> tuple[str, ...]:
        """For the table."""
        (rss, rss_end), (fds, fds_end) = self._levels(self.rss), self._levels(self.descriptors)
        most = max(self.descriptors, default=0)
        return self.name, f"{rss / MIB:.1f} -> {rss_end / MIB:.1f} MiB", f"{fds:.0f} -> {fds_end:.0f}, {most} at most"

    @property
    def problem(self) -> str | None:
        """What grew, in words."""
        (rss, rss_end), (fds, fds_end) = self._levels(self.rss), self._levels(self.descriptors)
        if self.bounded and self.steady and rss_end - rss > GROWN_BYTES:
            return f"the memory of {self.name} grew from {rss / MIB:.1f} to {rss_end / MIB:.1f} MiB"
        if self.steady and fds_end - fds > GROWN_DESCRIPTORS:
            return f"the descriptors of {self.name} grew from {fds:.0f} to {fds_end:.0f}"
        if max(self.descriptors, default=0) > MOST_DESCRIPTORS:
            return f"{self.name} has {max(self.descriptors)} descriptors"
        return None
