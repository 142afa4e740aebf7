"""One role in a process of its own: attaches to the plane, works until it is told to stop, and tells what it did.

It is told "go" and "stop" over a pipe. Back go entries: each is a method of the driver's Account or Progress, with
arguments, and is on its way before the role goes on. So what a process knew that was killed is known all the same.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

import anyio
import anyio.from_thread
import structlog

from asyncdp.examples.async_grpo import be_small
from asyncdp.examples.grpo_controller import SingleController
from asyncdp.examples.grpo_counts import counts_of
from asyncdp.examples.grpo_failure import Failure, said
from asyncdp.examples.grpo_faults import fault_plan
from asyncdp.examples.grpo_plane import DemoConfig, attach, insist
from asyncdp.examples.grpo_trainer import Trainer
from asyncdp.examples.grpo_worker import RolloutWorker
from asyncdp.examples.policy import make_task
from asyncdp.metrics.published import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from asyncdp import Client
    from asyncdp.examples.grpo_account import Account
    from asyncdp.examples.grpo_progress import Progress
    from asyncdp.testing import FaultPlan

__all__ = ["GO", "READY", "STOP", "Kind", "Role", "play"]

READY: Final = "ready"
"""What a process says once it has attached."""
GO: Final = "go"
STOP: Final = "stop"
"""What it is told."""
COUNT_EVERY_S = 0.5
"""Seconds between two reports of what the client has counted."""


class Kind(StrEnum):
    """What a role does."""

    WORKER = "worker"
    TRAINER = "trainer"
    CONTROLLER = "controller"


@dataclass(frozen=True)
class Role:
    """Who a process is.

    Attributes:
        kind: What it does.
        number: Which of its kind. A worker that takes the place of another one has a number of its own: its sample ids
            begin with it, and none may be used twice.
        config: Of the run.
        plane: Where to attach: the ``attach_config()`` of the client that started the plane.
    """

    kind: Kind
    number: int
    config: DemoConfig
    plane: dict[str, Any]

    @property
    def name(self) -> str:
        """What it is called, by the plane too."""
        return f"{self.kind}-{self.number}" if self.kind is Kind.WORKER else self.kind


class Entry(NamedTuple):
    """Something to write down: the method of a book, and its arguments."""

    book: Literal["account", "progress"]
    method: str
    args: tuple[Any, ...]


class _Forwarded:
    """Stands for the driver's account, or progress: what is called here is done there. Nothing comes back."""

    def __init__(self, book: Literal["account", "progress"], send: Callable[[Entry], None]) -> None:
        self._book: Literal["account", "progress"] = book
        self._send = send

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args: self._send(Entry(self._book, method, args))


def play(role: Role, pipe: Connection) -> None:
    """Be the role, from start to end of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the driver, and with it all others
    be_small()
    errors = structlog.make_filtering_bound_logger(logging.ERROR)  # its faults are the driver's to show
    structlog.configure(wrapper_class=errors)
    try:
        anyio.run(_play, role, pipe)
    except Exception as err:  # noqa: BLE001 - the driver says it, in a line
        with suppress(OSError):
            pipe.send(Failure(said(err)))
        sys.exit(1)
    # All is closed and told. What is left is to take torch's modules apart: a second of computing per process.
    os._exit(0)


async def _play(role: Role, pipe: Connection) -> None:
    config = role.config
    told = {GO: anyio.Event(), STOP: anyio.Event()}
    plan = fault_plan(config.seed, config.seconds, memory=False) if config.faults else None
    async with anyio.from_thread.BlockingPortal() as portal, attach(role.plane, role.name, plan) as plane:
        threading.Thread(target=_listen, args=(pipe, portal, told), daemon=True).start()
        await insist(plane.ping)
        pipe.send(READY)
        await told[GO].wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_keep_counting, role, plane, plan, pipe)
            if config.publish:
                tasks.start_soon(Publisher(plane).run)
            await _work(role, plane, pipe, told[STOP])
            tasks.cancel_scope.cancel()
    # Closing has found out what became of what was under way, and that counts as well.
    pipe.send(_counts(role, plane, plan))


async def _work(role: Role, plane: Client, pipe: Connection, stop: anyio.Event) -> None:
    config, task = role.config, make_task(role.config.seed)
    account = cast("Account", _Forwarded("account", pipe.send))
    progress = cast("Progress", _Forwarded("progress", pipe.send))
    if role.kind is Kind.WORKER:
        await RolloutWorker(role.number, plane, config, task, account).run(stop)
    elif role.kind is Kind.TRAINER:
        await Trainer(plane, config, task, account, progress).run(stop)
    else:
        await SingleController(plane, config, account, progress).run(stop)


async def _keep_counting(role: Role, plane: Client, plan: FaultPlan | None, pipe: Connection) -> None:
    while True:
        await anyio.sleep(COUNT_EVERY_S)
        pipe.send(_counts(role, plane, plan))


def _counts(role: Role, plane: Client, plan: FaultPlan | None) -> Entry:
    return Entry("progress", "counted", (role.name, counts_of(plane, plan)))


def _listen(pipe: Connection, portal: anyio.from_thread.BlockingPortal, told: dict[str, anyio.Event]) -> None:
    """Pass on what the driver says. When its end of the pipe closes it is dead: then nobody is left to work for."""
    while True:
        try:
            word = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        with suppress(RuntimeError):  # told to stop while it ends by itself
            portal.start_task_soon(told[word].set)
