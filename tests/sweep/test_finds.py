"""The sweep finds what it is there for: transports that break one promise each under a cancel."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from asyncdp import MemoryTransport
from asyncdp.calls import ClearSamples
from asyncdp.testing import FaultPlan, run_virtual
from asyncdp.testing.contract import by_config
from asyncdp.testing.sweep import SweptVerb, cancellation_sweep


class Swallows(MemoryTransport):
    """Takes a cancel for an answer."""

    async def _ping(self, call: Any, ctx: Any) -> None:
        try:
            await super()._ping(call, ctx)
        except anyio.get_cancelled_exc_class():
            return


class KeepsReading(MemoryTransport):
    """Ends a read only where it went well."""

    async def _read(self, call: Any, ctx: Any) -> Any:
        host = self._host(call.host, call.port)
        attempt = host.begin_read(call.refs[0])
        result = await super()._read(call, ctx)
        host.finish_read(attempt)  # type: ignore[arg-type]
        return result


class Forgets(MemoryTransport):
    """Does not give a claim back that nobody got."""

    async def _abandon(self, call: Any, ctx: Any) -> None:
        await self._wire(call)


class LeavesTasks(MemoryTransport):
    """Leaves a task behind."""

    async def _depth(self, call: Any, ctx: Any) -> int:
        self.left = asyncio.create_task(asyncio.sleep(1000), name="left")
        return await super()._depth(call, ctx)


class ClearsHalf(MemoryTransport):
    """Removes one sample after the other."""

    async def _clear(self, call: Any, ctx: Any) -> int:
        for one in call.sample_ids:
            await super()._clear(ClearSamples((one,), call.partition_id), ctx)
            ctx = type(ctx)(ctx.env, ctx.env.next_op_id(), ctx.deadline, ctx.verb)
        return len(call.sample_ids)


class MixesUp(MemoryTransport):
    """Gives the answer that a cancelled call did not take to the next one."""

    kept: Any = None

    async def _read(self, call: Any, ctx: Any) -> Any:
        result = await super()._read(call, ctx)
        if len(call.refs) == 1 and self.kept is not None:
            return self.kept
        self.kept = result
        await anyio.lowlevel.checkpoint()
        self.kept = None
        return result


@pytest.mark.parametrize(
    ("kind", "verb", "said"),
    [
        (Swallows, "ping", "the cancel was swallowed"),
        (KeepsReading, "get_samples", "reads of host-"),
        (Forgets, "claim_meta", "are claimed for ever"),
        (LeavesTasks, "depth", "tasks are left: .*'left"),
        (ClearsHalf, "clear_samples", "the first two were to go, and there are"),
        (MixesUp, "get_data", "the reply of another one|fails without a cancel|DataPlane"),
    ],
)
def test_a_broken_promise_is_found(kind: Any, verb: str, said: str) -> None:
    """Each is a failure that names the promise."""
    late = lambda: FaultPlan().delay(0.1, reply=True)  # noqa: E731 - the backend has acted, and the call waits
    with pytest.raises(AssertionError, match=said):
        run_virtual(lambda: cancellation_sweep(by_config(kind), verb, faults=late), limit_s=1e6)


def test_it_says_where_and_how() -> None:
    """The message has the way, the checkpoint, and how many there are."""
    with pytest.raises(AssertionError, match=r"cancelled by scope at checkpoint 1 of 1: .*swallowed"):
        run_virtual(lambda: cancellation_sweep(by_config(Swallows), "ping", ways=["scope"]))


def test_a_verb_of_ones_own() -> None:
    """Any coroutine function can be swept; what fails without a cancel is said to."""

    async def twice(client: Any, partition: str, given: Any) -> None:
        await client.depth(partition)
        await client.depth(partition)

    async def wrong(client: Any, partition: str, given: Any) -> None:
        raise LookupError("no such thing")

    swept = run_virtual(lambda: cancellation_sweep(by_config(MemoryTransport), SweptVerb(twice)))
    assert (swept.steps, swept.cancels.total(), swept.early) == (2, 6, 0)
    with pytest.raises(AssertionError, match="fails without a cancel: LookupError: no such thing"):
        run_virtual(lambda: cancellation_sweep(by_config(MemoryTransport), SweptVerb(wrong)))


def test_what_there_is_not_is_refused() -> None:
    """An unknown verb, or a way that the loop has not."""
    with pytest.raises(ValueError, match="verb: 'get_sample' is not one of"):
        run_virtual(lambda: cancellation_sweep(by_config(MemoryTransport), "get_sample"))
    with pytest.raises(ValueError, match="ways: 'native' is not one of"):
        run_virtual(lambda: cancellation_sweep(by_config(MemoryTransport), "ping", ways=["native"]), "trio")
