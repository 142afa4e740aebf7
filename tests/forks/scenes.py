"""Programs that use a plane and fork, as users write them; each in a process of its own, for an interpreter ends once.

``python -m tests.forks.scenes CONFIG SCENE...`` attaches to the plane of a config (JSON; ``bootstrap`` where it has no
``controller_address`` and no ``endpoints``) and plays the scenes, one after the other. Exit code 0: all went well.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from asyncdp import DataPlaneBadRequest, DataPlaneUnavailable, DataPlaneUnsupported, build_data_plane_client
from asyncdp.testing.contract.children import PATIENCE_S, Child, fork

__all__ = ["SCENES", "play"]

ROOT = Path(__file__).parents[2]
#: 2 MiB a row: over the wire that is UCX's.
WIDE = 1 << 19


class Squares(Dataset[int]):
    """A dataset that never heard of the plane."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> int:
        gc.collect(0)
        return at * at


class Scene:
    """A client in use.

    Attributes:
        client: It has read over everything that it has.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        own = config.get("transfer_queue") or {}
        self.bootstrap = not (config.get("controller_address") or own.get("endpoints"))
        # No attempt is given up: a read whose connection a child broke fails, where another attempt would hide it.
        layers = {**(config.get("layers") or {}), "attempt_timeout": {"attempt_timeout_s": 120.0}}
        self.client = build_data_plane_client({**config, "layers": layers}, bootstrap=self.bootstrap)

    async def fill(self) -> None:
        """Put two wide rows, and read them."""
        await self.client.register_partition("p", ["x", "y"], 8, ["train"])
        rows = {"x": torch.arange(2.0)[:, None].expand(2, WIDE), "y": torch.arange(2)}
        await self.client.put_samples(["a", "b"], "p", rows)
        await self.read()

    async def read(self, times: int = 1) -> None:
        """Read, and see that it is right."""
        for _ in range(times):
            got = await self.client.get_samples(["b", "a"], "p", ["x"], timeout_s=30)
            assert got["x"][:, -1].tolist() == [1.0, 0.0]


def _collect() -> None:
    gc.collect()


def ends(scene: Scene) -> None:
    """Children of a program between two event loops: os._exit, sys.exit, garbage, close, loss of all."""
    client = scene.client

    def lose() -> None:
        scene.__dict__.clear()
        _collect()

    def refused() -> None:
        with contextlib.suppress(DataPlaneBadRequest):
            asyncio.run(client.ping())
            raise AssertionError("it was not refused")

    def start() -> None:
        subprocess.run(["true"], check=True)

    works: list[tuple[Callable[[], object], bool]] = [
        (lambda: None, False),
        (lambda: None, True),
        (_collect, False),
        (lose, False),
        (lambda: asyncio.run(client.close()), True),
        (refused, False),
        (start, False),
    ]
    for work, exits in works:
        child = fork(work, exits=exits)
        asyncio.run(scene.read(2))
        assert child.wait() == 0
        asyncio.run(scene.read())


def inside(scene: Scene) -> None:
    """Children of a running event loop, with calls under way: by os._exit, by sys.exit, which takes the loop down."""

    async def play() -> None:
        for exits in (False, True):
            reads = [asyncio.create_task(scene.read(3)) for _ in range(3)]
            claim = asyncio.create_task(
                scene.client.claim_meta("p", "train", ["x"], 99, min_batch_size=99, timeout_s=2)
            )
            await asyncio.sleep(0.01)
            child = fork(_collect, exits=exits)
            await asyncio.gather(*reads)
            assert await child.code() == 0
            await asyncio.gather(claim, return_exceptions=True)
            await scene.read(2)

    asyncio.run(play())


def threads(scene: Scene) -> None:
    """Children of another thread than that of the loop, while reads run; of a child; many of them."""
    forked: list[Child] = []

    def grandchild() -> None:
        assert fork(_collect).wait() == 0

    def fork_often() -> None:
        for work in (_collect, lambda: None, grandchild, _collect):
            forked.append(fork(work))
            time.sleep(0.01)

    async def play() -> None:
        thread = threading.Thread(target=fork_often)
        thread.start()
        while thread.is_alive():
            await scene.read()
        for child in forked:
            assert await child.code() == 0
        await scene.read()

    asyncio.run(play())


def libraries(scene: Scene) -> None:
    """The fork of multiprocessing, and torch's DataLoader, of code that never heard of the plane."""
    context = multiprocessing.get_context("fork")
    for target, code in ((_collect, 0), (lambda: sys.exit(3), 3)):
        process = context.Process(target=target)
        process.start()
        asyncio.run(scene.read())
        process.join(2 * PATIENCE_S)
        assert process.exitcode == code

    async def play() -> None:
        for _ in range(2):
            found = []
            for batch in DataLoader(Squares(), batch_size=4, num_workers=2):  # type: ignore[var-annotated]
                found += batch.tolist()
                await scene.read()
            assert found == [at * at for at in range(16)]
        await scene.read()

    asyncio.run(play())


def own(scene: Scene) -> None:
    """A child opens a client of its own: it works, or the error says what to do."""
    config = scene.client.attach_config()

    async def use() -> None:
        async with build_data_plane_client(config, bootstrap=False) as mine:
            assert (await mine.get_samples(["a", "b"], "p", ["y"], timeout_s=10))["y"].tolist() == [0, 1]
            os.write(1, b"read small rows\n")
            got = await mine.get_samples(["a", "b"], "p", ["x"], timeout_s=10)
            assert got["x"][:, 0].tolist() == [0.0, 1.0]

    def work() -> None:
        try:
            asyncio.run(use())
        except DataPlaneUnsupported as err:
            os.write(1, b"refused: start processes by spawn\n" if "by spawn" in str(err) else str(err).encode())
        except DataPlaneUnavailable:
            if not scene.bootstrap:  # a plane in memory is its process' alone
                raise

    assert fork(work).wait() == 0
    asyncio.run(scene.read(2))


def before(scene: Scene) -> None:
    """A child that was forked before the first use has the plane for itself, UCX as well."""

    def work() -> None:
        async def use() -> None:
            async with build_data_plane_client(scene.config, bootstrap=scene.bootstrap) as mine:
                await mine.register_partition("p", ["x"], 8, ["train"])
                await mine.put_samples(["c", "d"], "p", {"x": torch.arange(2.0)[:, None].expand(2, WIDE)})
                got = await mine.get_samples(["c", "d"], "p", ["x"], timeout_s=30)
                assert got["x"][:, 0].tolist() == [0.0, 1.0]
                await mine.clear_samples(["c", "d"], "p")

        asyncio.run(use())

    assert fork(work).wait() == 0


SCENES: dict[str, Callable[[Scene], None]] = {
    "before": before,
    "ends": ends,
    "inside": inside,
    "threads": threads,
    "libraries": libraries,
    "own": own,
}


def play(config: dict[str, Any], *names: str) -> list[str]:
    """Play scenes in a process of their own; returns what was said, a line each."""
    command = [sys.executable, "-m", "tests.forks.scenes", json.dumps(config), *names]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900, env=env)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout.splitlines()


def main() -> None:
    """Play what the arguments say; ``before`` comes first, where it is played."""
    gc.collect()
    gc.freeze()  # else each collection of a child, and its end, takes seconds: they look at all of torch
    config, names = json.loads(sys.argv[1]), sys.argv[2:]
    scene, filled = Scene(config), False
    for name in names:
        if name != "before" and not filled:
            asyncio.run(scene.fill())
            filled = True
        SCENES[name](scene)
        os.write(1, f"played {name}\n".encode())
    asyncio.run(scene.client.close())


if __name__ == "__main__":
    main()
