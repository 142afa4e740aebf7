"""Clients of somebody else's, with signatures of their own and a close() that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import structlog.testing
import torch

from asyncdp import Adapter, DataPlaneError, DataPlaneUnsupported, stack

pytestmark = pytest.mark.anyio


class Client:
    """Has one verb, and remembers how it was called."""

    def __init__(self) -> None:
        """Nothing was called yet."""
        self.calls: list[dict[str, Any]] = []

    def answer(self, **given: Any) -> Any:
        """Keep what was given; claim one sample."""
        self.calls.append(given)
        return SimpleNamespace(partition_id="p", task_name="t", sample_ids=["a"], fields=["f"])


class Plain(Client):
    """Without anything optional."""

    async def claim_meta(self, partition_id: str, task_name: str, required_fields: Any, batch_size: int) -> Any:
        """Claim."""
        return self.answer()


class PositionalOnly(Client):
    """Its blocking cannot be given by name."""

    async def claim_meta(self, partition_id: str, task: str, fields: Any, size: int, blocking: bool = True, /) -> Any:  # noqa: FBT001, FBT002
        """Claim."""
        return self.answer(blocking=blocking)


class Full(Client):
    """With all that there is."""

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Any,
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = False,  # noqa: FBT001, FBT002
        *,
        min_batch_size: int | None = None,
    ) -> Any:
        """Claim."""
        return self.answer(dp_rank=dp_rank, blocking=blocking, min_batch_size=min_batch_size)


class Any_(Client):  # noqa: N801
    """Takes whatever it is given."""

    async def claim_meta(self, *args: Any, **more: Any) -> Any:
        """Claim."""
        more.pop("timeout_s")
        return self.answer(**more)


ARGS: tuple[Any, ...] = ("p", "t", ["f"], 2)


@pytest.mark.parametrize("kind", [Plain, PositionalOnly])
async def test_what_a_signature_lacks_is_left_out(kind: Callable[[], Any]) -> None:
    """A claim with nothing unusual about it needs no optional argument."""
    async with stack(kind()) as client:
        assert (await client.claim_meta(*ARGS)).sample_ids == ["a"]


@pytest.mark.parametrize("kind", [Plain, PositionalOnly])
@pytest.mark.parametrize(
    "more", [{"blocking": False}, {"dp_rank": 0}, {"min_batch_size": 1}], ids=lambda m: next(iter(m))
)
async def test_what_a_signature_lacks_and_the_call_needs_is_unsupported(
    kind: Callable[[], Any], more: dict[str, Any]
) -> None:
    """DataPlaneUnsupported that names the argument; the client is not called, so nothing is ambiguous."""
    theirs = kind()
    (name,) = more
    async with stack(theirs) as client:
        with pytest.raises(DataPlaneUnsupported, match=name) as caught:
            await client.claim_meta(*ARGS, **more)
    assert (caught.value.capability, caught.value.ambiguous, theirs.calls) == (name, False, [])


@pytest.mark.parametrize("kind", [Full, Any_])
async def test_what_a_signature_has_is_passed(kind: Callable[[], Any]) -> None:
    """The flag blocking always, since its default may be another; dp_rank and min_batch_size where they were given."""
    theirs = kind()
    async with stack(theirs) as client:
        await client.claim_meta(*ARGS)
        await client.claim_meta(*ARGS, dp_rank=3, blocking=False, min_batch_size=1)
    assert theirs.calls[0]["blocking"] is True
    assert theirs.calls[1] == {"dp_rank": 3, "blocking": False, "min_batch_size": 1}


class Odd(Client):
    """Its put takes no tags, its clear wants more than there is."""

    async def put_samples(self, sample_ids: Any, partition_id: str) -> None:
        """Put."""
        self.answer()

    def clear_samples(self, sample_ids: Any, partition_id: str, reason: str) -> None:
        """Clear."""
        self.answer()

    async def get_samples(self, *args: Any, **more: Any) -> Any:
        """Get, and fail by a mistake of its own."""
        raise TypeError("inside")

    async def drop_partition(self, partition_id: str) -> None:
        """Drop, and fail by a mistake of its own."""
        raise TypeError("inside")


async def test_a_signature_of_another_shape_is_unsupported_and_sure() -> None:
    """A verb that cannot be called is DataPlaneUnsupported, naming it; nothing was sent, so it is not ambiguous."""
    theirs = Odd()
    async with stack(theirs) as client:
        for call, name in (
            (client.put_samples(["a"], "p", {"f": torch.zeros(1)}), "put_samples"),
            (client.clear_samples(["a"], "p"), "clear_samples"),
        ):
            with pytest.raises(DataPlaneUnsupported, match=rf"Odd\.{name}\(.*cannot be called") as caught:
                await call
            assert not caught.value.ambiguous
            assert (caught.value.capability, caught.value.op) == (name, name)
    assert theirs.calls == []


async def test_a_type_error_out_of_a_verb_is_not_sure() -> None:
    """What a verb raises once it runs may have acted: a mutation is ambiguous, and the cause is kept."""
    async with stack(Odd()) as client:
        with pytest.raises(DataPlaneError, match="inside") as caught:
            await client.drop_partition("p")
    assert not isinstance(caught.value, DataPlaneUnsupported)
    assert caught.value.ambiguous


# --- close


class Hangs(Plain):
    """Its close() does not end."""

    async def close(self) -> None:
        """Wait for ever."""
        await anyio.sleep_forever()


class HangsInAThread(Plain):
    """Its close() blocks until it is let go."""

    def __init__(self) -> None:
        """Make close() block until ``let_go`` is set."""
        super().__init__()
        self.let_go = threading.Event()

    def close(self) -> None:
        """Wait for long."""
        self.let_go.wait(30)


class Fails(Plain):
    """Its close() fails."""

    async def close(self) -> None:
        """Fail."""
        raise RuntimeError("the backend is gone")


class FailsInAThread(Plain):
    """The same, sync."""

    def close(self) -> None:
        """Fail."""
        raise OSError("the backend is gone")


@pytest.mark.parametrize("kind", [Hangs, HangsInAThread])
async def test_a_close_that_hangs_is_left_behind(kind: Callable[[], Any]) -> None:
    """It gets close_timeout_s, no more; the log says so."""
    theirs = kind()
    client = stack(Adapter(theirs, close_timeout_s=0.05))
    with structlog.testing.capture_logs() as logs, anyio.fail_after(60):
        await client.close()
    if isinstance(theirs, HangsInAThread):
        theirs.let_go.set()
    assert [(log["event"], log["client"], log["close_timeout_s"]) for log in logs] == [
        ("client_close_timed_out", kind.__name__, 0.05)  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("kind", [Fails, FailsInAThread])
async def test_a_close_that_fails_is_logged(kind: Callable[[], Any]) -> None:
    """What somebody else's close() raises goes to the log, not to the caller, who has nothing to close any more."""
    with structlog.testing.capture_logs() as logs:
        async with stack(kind()) as client:
            await client.claim_meta(*ARGS)
    assert [(log["event"], log["log_level"]) for log in logs] == [("client_close_failed", "warning")]
    assert "the backend is gone" in logs[0]["error"]


async def test_a_cancelled_close_is_cancelled() -> None:
    """Cancellation of the caller is no error of the client: it goes on up, without a line in the log."""
    client = stack(Adapter(Hangs()))
    with structlog.testing.capture_logs() as logs, anyio.move_on_after(0.05) as scope:
        await client.close()
    assert scope.cancelled_caught
    assert logs == []


@pytest.mark.parametrize("seconds", [0, -1, "x", True, 10**400], ids=lambda value: str(value)[:9])
def test_the_time_of_a_close_is_checked(seconds: Any) -> None:
    """ValueError that names it."""
    with pytest.raises(ValueError, match="close_timeout_s"):
        Adapter(Plain(), close_timeout_s=seconds)
    assert Adapter(Plain()).close_timeout_s == 5.0
