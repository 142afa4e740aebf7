"""Shows a run of the example: live in a terminal, as plain lines elsewhere. Needs the extra ``asyncdp[cli]``."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import anyio
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncdp.examples.grpo_counts import count_events, ports_out

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from asyncdp.examples.grpo_account import Account
    from asyncdp.examples.grpo_plane import DemoConfig
    from asyncdp.examples.grpo_progress import Point, Progress

__all__ = ["LiveView", "PlainView", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"
FRAME_S = 0.25
"""Seconds between two frames: smooth enough, and next to nothing beside the training."""
LINE_S = 3.0
"""Seconds between two plain lines."""


class LiveView:
    """Redraws one screen.

    Args:
        console: Where to draw.
        config: What is run.
    """

    def __init__(self, console: Console, config: DemoConfig) -> None:
        self.console = console
        self.config = config

    async def show(self, progress: Progress, account: Account, stop: anyio.Event) -> None:
        """Redraw until ``stop`` is set; the last frame stays."""
        with Live(console=self.console, auto_refresh=False, transient=False) as live:
            while not stop.is_set():
                live.update(self.render(progress, account), refresh=True)
                with anyio.move_on_after(FRAME_S):
                    await stop.wait()
            live.update(self.render(progress, account), refresh=True)

    def render(self, progress: Progress, account: Account) -> RenderableType:
        """Return one frame."""
        counts = progress.counts()
        width = max(20, min(self.console.width - 50, 80))
        curves = Table.grid(padding=(0, 2))
        curves.add_row("reward", sparkline(progress.rewards, width, top=1.0), _reward(progress))
        curves.add_row("depth", sparkline(progress.depths, width), _last(progress.depths, "{:.0f} groups in the plane"))
        curves.add_row("age", sparkline(progress.staleness, width), _last(progress.staleness, "{:.1f} versions behind"))
        facts = Table.grid(padding=(0, 2))
        facts.add_row("samples", "   ".join(f"{what} {count}" for what, count in account.counts.items()))
        facts.add_row("evicted", _tally(account.evicted_by_reason))
        facts.add_row("ages", _ages(progress))
        facts.add_row("ports", _ports(progress))
        facts.add_row("retries", _tally(count_events(counts, "retry", "reason")))
        facts.add_row("rotations", _tally(count_events(counts, "rotation", "reason")))
        facts.add_row("faults", _tally(progress.faults))
        if self.config.chaos:
            facts.add_row("chaos", "   ".join(_killed(progress)) or "-")
        title = (
            f"asyncdp demo   {self.config.transport}   seed {self.config.seed}   "
            f"{progress.elapsed_s():.0f} of {self.config.seconds:.0f} s   step {progress.steps}"
        )
        return Panel(Group(curves, Text(), facts), title=title, title_align="left")


class PlainView:
    """Prints a line every few seconds.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    async def show(self, progress: Progress, account: Account, stop: anyio.Event) -> None:
        """Print until ``stop`` is set."""
        while not stop.is_set():
            with anyio.move_on_after(LINE_S):
                await stop.wait()
            self.console.print(self.line(progress, account), highlight=False, soft_wrap=True)

    def line(self, progress: Progress, account: Account) -> str:
        """Return one line."""
        counts = progress.counts()
        out = ports_out(counts)
        parts = [
            f"{progress.elapsed_s():5.1f} s",
            f"step {progress.steps}",
            _last(progress.rewards, "reward {:.2f}"),
            _last(progress.depths, "depth {:.0f}"),
            _last(progress.staleness, "age {:.1f}"),
            *(f"{what} {count}" for what, count in account.counts.items()),
            f"ports out {sum(out.values())}/{len(out) * len(counts)}",
            f"retries {count_events(counts, 'retry', 'reason').total()}",
            f"faults {progress.faults.total()}",
            *_killed(progress)[-1:],
        ]
        return "  ".join(parts)


def sparkline(points: Sequence[Point], width: int, top: float | None = None) -> str:
    """Draw values as a line of bars, at most ``width`` of them, each the mean of its share; ``top`` is a full bar."""
    if not points:
        return ""
    count = min(width, len(points))
    edges = [len(points) * i // count for i in range(count + 1)]
    means = [sum(point.value for point in points[a:b]) / (b - a) for a, b in pairwise(edges)]
    full = max(*means, 1e-9) if top is None else top
    return "".join(BARS[min(len(BARS) - 1, int(mean / full * len(BARS)))] for mean in means)


def _reward(progress: Progress) -> str:
    seen = progress.evaluations
    now = _last(progress.rewards, "{:.2f}")
    return f"{now}   held-out {seen[0].value:.2f} -> {seen[-1].value:.2f}" if seen else now


def _last(points: Sequence[Point], text: str) -> str:
    return text.format(points[-1].value if points else 0.0)


def _tally(counts: Counter[str] | dict[str, int]) -> str:
    return "   ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda c: -c[1])) or "-"


def _killed(progress: Progress) -> list[str]:
    return [f"{event['what']} at {event['at_s']:.0f} s" for event in progress.killed]


def _ages(progress: Progress) -> str:
    seen = sorted(progress.ages.items())
    return "   ".join(f"{count} groups {age} behind" for age, count in seen) or "-"


def _ports(progress: Progress) -> Text:
    """Draw a green dot for each port that all clients use, for others how many of them leave it alone."""
    text, host_before, counts = Text(), "", progress.counts()
    for (host, _), out in ports_out(counts).items():
        if host != host_before:
            text.append(f"{'   ' if host_before else ''}{host} ")
            host_before = host
        text.append(f"{out} " if out else "● ", style="red" if out else "green")
    text.append(f"  clients of {len(counts)} that leave it alone", style="dim")
    return text
