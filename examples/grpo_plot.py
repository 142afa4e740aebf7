"""Plots a run of the example. Needs the extra ``asyncdp[plot]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncdp.examples.async_grpo import Report
    from asyncdp.examples.grpo_progress import Point

__all__ = ["plot"]


def plot(report: Report, path: Path) -> None:
    """Write reward, depth and age over time to ``path``, as PNG."""
    progress = report.progress
    figure: Any = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen
    reward, depth, age = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    reward.plot(*_axes(progress.rewards), color="tab:blue", alpha=0.5, label="trained batches")
    reward.plot(*_axes(progress.evaluations), "o-", color="tab:red", label="held-out prompts")
    reward.set(
        ylabel="reward", ylim=(0, 1), title=f"asyncdp demo, {report.config.transport}, seed {report.config.seed}"
    )
    reward.legend(loc="upper left")
    depth.plot(*_axes(progress.depths), color="tab:green")
    depth.axhline(report.config.max_depth, color="grey", linestyle=":", label="workers pause")
    depth.set(ylabel="groups in the plane", ylim=(0, None))
    depth.legend(loc="lower right")
    age.plot(*_axes(progress.staleness), color="tab:purple")
    age.axhline(report.config.max_age, color="grey", linestyle=":", label="evicted above")
    age.set(ylabel="versions behind", xlabel="seconds", ylim=(0, None))
    age.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=110)


def _axes(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.at_s for point in points], [point.value for point in points]
