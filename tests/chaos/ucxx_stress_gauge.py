"""Memory and descriptors of processes over time: flat, or growing."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

__all__ = ["Gauge"]

MIB = 1 << 20
#: What a process may grow by while its load stays as it is: buffers of new sizes, the allocator's own.
GROWN_BYTES = 24 * MIB
GROWN_SHARE = 0.1
GROWN_DESCRIPTORS = 6


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

    @staticmethod
    def _halves(samples: list[int]) -> tuple[float, float]:
        """The level after warming up, and that at the end: medians of the second and of the last quarter."""
        quarter = max(1, len(samples) // 4)
        return statistics.median(samples[quarter : 2 * quarter] or samples), statistics.median(samples[-quarter:])

    @property
    def row(self) -> tuple[str, ...]:
        """For the table."""
        (rss, rss_end), (fds, fds_end) = self._halves(self.rss), self._halves(self.descriptors)
        most = max(self.descriptors, default=0)
        return self.name, f"{rss / MIB:.1f} -> {rss_end / MIB:.1f} MiB", f"{fds:.0f} -> {fds_end:.0f}, {most} at most"

    @property
    def problem(self) -> str | None:
        """What grew, in words."""
        (rss, rss_end), (fds, fds_end) = self._halves(self.rss), self._halves(self.descriptors)
        if self.bounded and rss_end - rss > max(GROWN_BYTES, GROWN_SHARE * rss):
            return f"the memory of {self.name} grew from {rss / MIB:.1f} to {rss_end / MIB:.1f} MiB"
        if fds_end - fds > GROWN_DESCRIPTORS:
            return f"the descriptors of {self.name} grew from {fds:.0f} to {fds_end:.0f}"
        return None
