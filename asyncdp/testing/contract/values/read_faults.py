"""Promise 2 under faults: only failed rows are read again, and damaged payload is never returned as data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import (
    CorruptPayload,
    DataPlaneError,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    PartialReadError,
)
from asyncdp.calls.slots import ReadResult, ReadSlots

from ..faults import GET, Fail, LoseReply, Tamper
from ..rig import declare
from ..same import check_same, rows_of
from ..steps import IDS, fill

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["ReadFaults"]

DAMAGE = {
    "nothing": lambda _: ReadResult((), {}),
    "a row fewer": lambda r: _with(r, block=r.parts[0].block.take(range(r.parts[0].block.n - 1))),
    "a column fewer": lambda r: _with(r, block=r.parts[0].block.take(range(r.parts[0].block.n), [])),
    "another length": lambda r: _with(r, nbytes=tuple(n + 1 for n in r.parts[0].nbytes)),
    "another schema": lambda r: _with(r, schema=r.parts[0].schema ^ 1),
}


def _with(result: ReadResult, **changes: Any) -> ReadResult:
    return ReadResult((replace(result.parts[0], **changes), *result.parts[1:]), result.errors)


class ReadFaults(Contract):
    """Promise 2 under faults: only failed rows are read again, and damaged payload is never returned as data."""

    async def test_only_the_row_that_failed_is_asked_for_again(self, rig: Rig) -> None:
        """P2: if a part of an answer for 64 rows fails once, the second request names only those rows."""
        rig.need("slot_addressable")
        ids = [f"r{i}" for i in range(64)]
        asked: list[int] = []
        spoilt: list[int] = []

        def spoil(result: ReadResult) -> ReadResult:
            part, *rest = result.parts
            spoilt.append(part.block.n)  # a part may contain several slots
            err = DataPlaneUnavailable("reset", host="h", port=1)
            return ReadResult(tuple(rest), {**result.errors, **dict.fromkeys(part.refs, err)})

        class Spoil(Tamper):
            async def serve(self, call: Any, ctx: Any, send: Any) -> Any:
                if isinstance(call, ReadSlots):
                    asked.append(sum(len(ref.rows) for ref in call.refs))
                return await super().serve(call, ctx, send)

        client = await rig.attach(Spoil(ReadSlots, change=spoil))
        await fill(rig, ids)
        got = await client.get_samples(ids, "p", ["x"])
        check_same(got["x"], torch.arange(64))
        assert sum(asked) == 64 + spoilt[0]
        assert asked[-1] == spoilt[0] < 64

    async def test_a_read_whose_answer_is_lost_is_sent_again(self, rig: Rig) -> None:
        """A lost answer costs one more request, not the read."""
        lost = LoseReply(GET)
        client = await rig.attach(lost)
        await fill(rig)
        check_same((await client.get_samples(["s2"], "p", ["x"]))["x"], torch.tensor([2]))
        assert lost.struck == 1

    async def test_a_read_that_fails_on_all_attempts_is_the_error_itself(self, rig: Rig) -> None:
        """If no row was read, the read raises the typed error itself, with its attempts, and no layer retries it."""
        client = await rig.attach(Fail(GET, times=999))
        await fill(rig)
        with pytest.raises(DataPlaneUnavailable, match="refused") as caught:
            await client.get_samples(IDS, "p", ["x"], timeout_s=30)
        err = caught.value
        assert err.op == "get_samples"
        assert err.attempts > 1
        assert not err.retryable
        assert not err.ambiguous

    @pytest.mark.parametrize("name", DAMAGE)
    async def test_a_short_or_damaged_transfer_is_never_taken_for_data(self, rig: Rig, name: str) -> None:
        """P3: payload that is damaged once is read again; payload that is always damaged raises CorruptPayload."""
        rig.need("slot_addressable")
        harm = Tamper(ReadSlots, change=DAMAGE[name])
        client = await rig.attach(harm)
        await declare(rig.client)
        await rig.client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        check_same((await client.get_samples(["a", "b"], "p", ["x"]))["x"], torch.arange(2))
        assert harm.struck == 1
        harm.times = 999
        with pytest.raises((CorruptPayload, PartialReadError)) as caught:
            await client.get_samples(["a", "b"], "p", ["x"], timeout_s=30)
        err = caught.value
        assert all(isinstance(e, CorruptPayload) for e in getattr(err, "errors", {0: err}).values())

    async def test_a_stored_none_is_none_and_not_an_error(self, rig: Rig) -> None:
        """P3: None and b"" that were put are returned as data."""
        await declare(rig.client)
        await rig.client.put_samples(["a", "b"], "p", {"x": [None, b""]})
        assert rows_of((await rig.client.get_samples(["b", "a"], "p", ["x"])).get("x")) == [b"", None]

    async def test_a_raw_error_of_the_backend_is_typed(self, rig: Rig) -> None:
        """Any exception of a backend leaves the client as an error of asyncdp with this exception as its cause."""
        raw = RuntimeError("bare metal")

        def fail() -> Any:
            raise raw

        client = await rig.attach(Fail(GET, make=fail, times=99))
        await fill(rig)
        with pytest.raises(DataPlaneReadError, match="bare metal") as caught:
            await client.get_samples(["s0"], "p", ["x"])
        assert caught.value.__cause__ is raw
        assert caught.value.cause_text == "RuntimeError: bare metal"
        assert not caught.value.retryable

    @pytest.mark.parametrize(
        ("raw", "typed"),
        [
            (ConnectionRefusedError("no"), DataPlaneUnavailable),
            (ConnectionResetError("gone"), DataPlaneUnavailable),
            (TimeoutError("late"), DataPlaneTimeout),
            (EOFError("end"), DataPlaneUnavailable),
            (KeyError("k"), DataPlaneReadError),
        ],
        ids=lambda v: type(v).__name__ if isinstance(v, Exception) else "",
    )
    async def test_raw_connectivity_errors_keep_their_meaning(
        self, rig: Rig, raw: Exception, typed: type[DataPlaneError]
    ) -> None:
        """Refused and reset connections are DataPlaneUnavailable, late answers DataPlaneTimeout, also for reads."""

        def fail() -> Any:
            raise raw

        client = await rig.attach(Fail(GET, make=fail, times=999))
        await fill(rig)
        with pytest.raises(typed):
            await client.get_samples(["s0"], "p", ["x"], timeout_s=30)
