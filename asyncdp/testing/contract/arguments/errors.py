"""Errors keep their type and attributes when they are pickled, as Ray does between processes."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asyncdp import DataPlaneError, DataPlaneReadError, PartialReadError
from asyncdp.process.tracebacks import FULL

from ..base import Contract
from ..faults import GET, Fail
from ..rig import Rig, declare, table
from ..same import check_same
from ..steps import fill

__all__ = ["Errors"]


class Errors(Contract):
    """Errors keep their type and attributes when they are pickled, as Ray does between processes."""

    async def test_errors_of_a_real_client_survive(self, rig: Rig) -> None:
        """The errors of real calls survive, with all attributes that the layers added."""
        await declare(rig.client, "x", "y")
        float8 = torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn)
        data = table(x=torch.arange(2, dtype=torch.bfloat16), y=float8)
        await rig.client.put_samples(["a", "b"], "p", data)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: rig.client.get_samples(["nobody"], "p", ["x"]),
            lambda: rig.client.get_samples(["a", "nobody", "b"], "p", ["y", "x"]),
            lambda: rig.client.claim_meta("p", "train", ["x"], 9, timeout_s=0.2),
            lambda: rig.client.depth("mistyped"),
            lambda: rig.client.put_samples(["c"], "p", {"x": torch.zeros(1)}),
        ]
        for call in calls:
            with pytest.raises(DataPlaneError) as caught:
                await call()
            err = caught.value
            twin = pickle.loads(pickle.dumps(err))
            assert type(twin) is type(err)
            assert str(twin) == str(err)
            if isinstance(twin, PartialReadError):
                check_same(twin.rows["x"], data["x"])
                check_same(twin.rows["y"], data["y"])
                check_same((await rig.client.get_data(twin.ok))["x"], data["x"])
            else:
                assert {n: v for n, v in vars(twin).items() if n[0] != "_"} == {
                    n: v for n, v in vars(err).items() if n[0] != "_"
                }

    @pytest.mark.parametrize("full", [False, True], ids=["short", "full"])
    async def test_an_uncaught_error_prints_its_verb_and_its_cause(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, *, full: bool
    ) -> None:
        """The traceback shows verb, cause and raising frame; on request, all frames and causes."""
        monkeypatch.setenv(FULL, "1" if full else "")
        await fill(rig)
        client = await rig.attach(Fail(GET, make=lambda: deep(40), times=99))
        with pytest.raises(DataPlaneReadError) as caught:
            await client.get_samples(["s0"], "p", ["x"])
        err = caught.value
        printed = "".join(traceback.format_exception(err))
        assert "RuntimeError: bare metal\n" in printed
        assert "raise RuntimeError" in printed
        assert "in get_samples" in printed
        assert "op=get_samples" in printed.splitlines()[-1]
        assert ("ValueError: rust" in printed) is full
        assert full or printed.count("\n  File ") <= 8  # the test, three frames of the client, the last of each error
        assert isinstance(err.__cause__, RuntimeError)
        assert (len(list(traceback.walk_tb(err.__cause__.__traceback__))) > 40) is full
        behind = err.__cause__.__cause__ if full else err.__cause__.__context__
        assert isinstance(behind, ValueError)
        assert str(pickle.loads(pickle.dumps(err))) == str(err)


def deep(frames: int) -> Any:
    """Raise an error with a cause, at a depth of ``frames`` frames."""
    if frames:
        return deep(frames - 1)
    raise RuntimeError("bare metal") from ValueError("rust")
