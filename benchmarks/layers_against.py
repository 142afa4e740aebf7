"""What the layers cost beside another checkout, in turns: is any row slower than before?

    python -m benchmarks layers_against PATH [--turns 24]

Gets and puts of one row on memory: the transport alone, the default stack, what the stack adds to the transport, and
the stack built up layer by layer from below. A row is slower where all of the range of its median (see ``_turns.py``)
lies above 1.05. The exit code is 1 where any is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from tensordict import TensorDict

import asyncdp
from benchmarks._turns import Turn, compare, line, pairs, serve

SLOWER: Final = 1.05
#: Calls of each row in one round, and rounds in one turn; a turn is the median over its rounds.
CALLS: Final = 25
ROUNDS: Final = 8
#: From below; Metrics and SlotMapping are in every stack.
ORDER: Final = ("TypedErrors", "AttemptTimeout", "PortRotation", "SlotRetry", "Reconcile", "BatchRetry")
OUTER: Final = ("Metrics", "BatchRetry", "SlotMapping", "Reconcile", *reversed(ORDER[:4]))


def _stacks(transport: Any) -> dict[str, Any]:
    """Clients by name, each with one layer more than the one before."""
    out = {}
    for count in range(len(ORDER)):
        chosen = {"Metrics", "SlotMapping", *ORDER[:count]}
        name = f"get, + {ORDER[count - 1]}" if count else "get, Metrics+SlotMapping"
        out[name] = asyncdp.stack(transport, [getattr(asyncdp, kind) for kind in OUTER if kind in chosen])
    out["default stack"] = asyncdp.stack(transport)
    return out


async def _measure() -> None:
    torch.set_num_threads(1)
    transport = asyncdp.MemoryTransport()
    alone = asyncdp.Client(transport)
    data = TensorDict({"x": torch.zeros(1, 8)}, [1])
    await alone.register_partition("p", ["x"], 1, ["t"])
    await alone.put_samples(["s"], "p", data)

    def get(client: Any) -> Awaitable[Any]:
        return client.get_samples(["s"], "p", ["x"])  # type: ignore[no-any-return]

    def put(client: Any) -> Awaitable[Any]:
        return client.put_samples(["s"], "p", data)  # type: ignore[no-any-return]

    stacks = _stacks(transport)
    whole = stacks.pop("default stack")
    works: dict[str, Callable[[], Awaitable[Any]]] = {}
    for what, work in (("get", get), ("put", put)):
        works[f"{what}, transport alone"] = partial(work, alone)
        works[f"{what}, default stack"] = partial(work, whole)
    works |= {name: partial(get, client) for name, client in stacks.items()}

    async def turn() -> Turn:
        seconds: dict[str, list[float]] = {}
        gc.collect()
        gc.disable()
        for _ in range(ROUNDS):
            for name, work in works.items():
                began = time.perf_counter()
                for _ in range(CALLS):
                    await work()
                seconds.setdefault(name, []).append((time.perf_counter() - began) / CALLS)
            for what in ("get", "put"):
                cost = seconds[f"{what}, default stack"][-1] - seconds[f"{what}, transport alone"][-1]
                seconds.setdefault(f"{what}, what the stack adds", []).append(cost)
        gc.enable()
        return {name: statistics.median(values) for name, values in seconds.items()}

    await serve(turn)
    await transport.close()


def main() -> int:
    """Measure both checkouts and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "before", type=Path, metavar="PATH", help="the checkout to compare with, such as a git worktree"
    )
    parser.add_argument("--turns", type=int, default=24, help="turns of both (default: 24); six at the least")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        asyncio.run(_measure())
        return 0
    before = args.before.resolve()
    line(f"this checkout beside {before}"[:44], "before", "now", "now / before", "95 %")
    rows = pairs(before, "benchmarks.layers_against", "all", args.turns)
    slower = compare(rows, lambda _, __, low: low > SLOWER)
    print(f"slower: {', '.join(slower) or 'none'}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
