"""A program that borrows rows of a slot: ``python -m tests.ucxx.borrowing ARENA``; a line of input is one step.

``borrow SLOT GENERATION`` prints the first value; ``drop`` gives the rows back; ``fork`` starts a child that has them
too and does what the lines after it say, until ``end``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from asyncdp.calls.slots import HostRef, SlotRef
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.process.private_mapping import mapping_at
from asyncdp.rows.block import PICKLE
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.slots.arena import Arena


def main() -> None:
    """Do what each line says."""
    arena = Arena.attach(sys.argv[1], "h", 7)
    assert arena is not None
    lane = Lane(arena, BufferPool(), PICKLE)
    values: Any = None
    child = 0
    for line in iter(sys.stdin.readline, ""):
        step, *numbers = line.split()
        if step == "borrow":
            ref = SlotRef(HostRef("h", 7, ()), int(numbers[0]), int(numbers[1]), ("a",), [0], [0])
            values = asyncio.run(lane.read([ref], borrow=True)).parts[0].block.columns["a"].values  # type: ignore[attr-defined]
            assert mapping_at(values.data_ptr()) is not None
        elif step == "write":
            values[:] = 99.0
        elif step == "drop":
            values = None
        elif step == "fork":
            child = os.fork()
            if child:
                os.waitpid(child, 0)
        elif step == "end":
            os._exit(0)
        print(step, None if values is None else values[0, 0].item(), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
