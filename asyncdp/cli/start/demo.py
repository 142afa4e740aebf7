"""The command ``asyncdp demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ..output_file import can_be_kept_private, can_be_plotted, can_be_written

if TYPE_CHECKING:
    from rich.console import Console

    from asyncdp.examples.async_grpo import DemoConfig, Report

__all__ = ["demo"]


def demo(  # noqa: PLR0913 - the options of a command
    *,
    seed: Annotated[int, typer.Option(help="Of weights, prompts, samples and faults.")] = 0,
    transport: Annotated[
        str, typer.Option(help="Backend: 'memory' runs in one process; 'transfer_queue' and 'ucxx' in several.")
    ] = "memory",
    backend: Annotated[
        str | None, typer.Option(help="Where rows lie: 'mooncake_cpu' with --transport transfer_queue.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="How long to train; twice as long where that is not enough.")
    ] = 45.0,
    faults: Annotated[bool, typer.Option(help="Whether to inject faults.")] = True,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill processes on the way.")] = False,
    controller: Annotated[
        bool, typer.Option("--controller", help="A controller that recovers, in place of the training of a policy.")
    ] = False,
    kill: Annotated[
        str | None,
        typer.Option(
            help="With --controller: controller, worker, scorer, trainer, host, directory, storage, random, or all: the"
            " plane with its memory too, restored from the last checkpoint."
        ),
    ] = None,
    checkpoint_every: Annotated[
        float | None, typer.Option(min=0.1, help="With --controller: seconds between checkpoints; 1.5 with --kill all.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=can_be_written, help="Write the account and all counters here.")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            callback=can_be_kept_private,
            help="Write what clients attach with here, for 'asyncdp top' and the other commands, private to its owner.",
        ),
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", callback=can_be_plotted, help="Write a PNG of reward, depth and age.")
    ] = None,
) -> None:
    """Train a small policy by asynchronous GRPO over a data plane, with faults injected, and account for every sample.

    Ends with code 1 if a sample was lost or trained on twice, if the reward did not rise, or if a process failed.
    """
    import anyio
    from rich.console import Console

    from asyncdp.examples import async_grpo, grpo_processes
    from asyncdp.examples.async_grpo import DemoConfig, be_small
    from asyncdp.examples.grpo_failure import said
    from asyncdp.examples.grpo_plane import plane_config
    from asyncdp.examples.grpo_view import LiveView, PlainView

    config = DemoConfig(seed, transport, seconds, faults, chaos, publish=config_file is not None, backend=backend)
    try:
        plane_config(config)
    except ValueError as err:
        raise typer.BadParameter(str(err)) from err
    be_small()
    console = Console()
    for option, given in (("--kill", kill), ("--checkpoint-every", checkpoint_every)):
        _only_with_controller(option, given, controller=controller)
    if config_file is not None and (controller or transport == "memory"):
        raise typer.BadParameter("--config goes with --transport ucxx or transfer_queue, and without --controller")
    if controller:
        _demo_controller(config, kill, checkpoint_every, console, json_file)
    view = LiveView(console, config) if console.is_terminal else PlainView(console)
    if transport != "memory":
        console.print("starting the plane and the processes: half a minute or so", highlight=False)
    try:
        if transport == "memory":
            report = anyio.run(async_grpo.run, config, view)
        else:
            report = anyio.run(grpo_processes.run, config, view, config_file)
    except Exception as err:
        typer.echo(f"asyncdp demo: {said(err)}", err=True)
        raise typer.Exit(1) from err
    _print_report(console, report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    if plot_file is not None:
        from asyncdp.examples.grpo_plot import plot

        plot(report, plot_file)
    raise typer.Exit(0 if report.balance.adds_up and report.rose else 1)


def _only_with_controller(option: str, given: object, *, controller: bool) -> None:
    if given is not None and not controller:
        raise typer.BadParameter(f"{option} goes with --controller")


def _demo_controller(
    config: DemoConfig, kill: str | None, checkpoint_s: float | None, console: Console, json_file: Path | None
) -> NoReturn:
    """Run the controller example; code 1 if the account does not add up or training did not go on."""
    import anyio

    from asyncdp.examples import single_controller
    from asyncdp.examples.grpo_failure import said

    def say(line: str) -> None:
        console.print(line, highlight=False)

    try:
        report = anyio.run(single_controller.run, config, kill, say, checkpoint_s)
    except ValueError as err:
        raise typer.BadParameter(str(err)) from err
    except Exception as err:
        typer.echo(f"asyncdp demo: {said(err)}", err=True)
        raise typer.Exit(1) from err
    for line in report.lines():
        say(line)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    raise typer.Exit(0 if report.tally.adds_up and report.went_on else 1)


def _print_report(console: Console, report: Report) -> None:
    verdict = "it rose" if report.rose else "IT DID NOT RISE"
    for line in (
        *report.balance.lines(),
        f"reward on held-out prompts {report.reward_start:.2f} -> {report.reward_end:.2f}: {verdict}",
    ):
        console.print(line, highlight=False)
