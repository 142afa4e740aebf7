"""Requests of many callers that are joined into one: who gets which answer, and what a cancel or an error does."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.rows.field_spec import FieldSpec
from asyncdp.transports.ucxx.directory.encoding.schema import Schema
from asyncdp.transports.ucxx.joined import Joined

pytestmark = pytest.mark.anyio
Answer = tuple[str, ...]


class Server:
    """Answers with what it was asked, once it may."""

    def __init__(self) -> None:
        """Answer nobody yet."""
        self.asked: list[tuple[str, Answer]] = []
        self.ended = 0
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def send(self, key: str, ids: Sequence[str]) -> Answer:
        """Answer a request."""
        self.asked.append((key, tuple(ids)))
        try:
            await self.open.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.ended += 1
        return tuple(ids)


async def ask(joined: Joined[str, str, Answer], name: str, key: str = "p", n: int = 2) -> Answer:
    """Ask for ``n`` ids of this caller; return them from the answer."""
    ids = [f"{name}.{at}" for at in range(n)]
    answer, first = await joined.ask(key, ids)
    return answer[first : first + n]


async def loop_passes(number: int = 5) -> None:
    """Let the event loop run."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_callers_of_one_turn_share_a_request() -> None:
    """Two go at once, the other 18 as one for each key, and each gets the answer to what it asked itself."""
    server = Server()
    joined = Joined(server.send)
    tasks = [asyncio.create_task(ask(joined, f"c{at}", "pq"[at % 2])) for at in range(20)]
    await loop_passes()
    assert len(server.asked) == 2
    server.open.set()
    answers = await asyncio.gather(*tasks)
    assert answers == [(f"c{at}.0", f"c{at}.1") for at in range(20)]
    assert sorted(len(ids) for _, ids in server.asked) == [2, 2, 18, 18]
    assert all({int(name[1:].split(".")[0]) % 2 for name in ids} == {"pq".index(key)} for key, ids in server.asked)


async def test_joined_requests_are_bounded() -> None:
    """None names more than 512 ids, and what names many goes alone."""
    server = Server()
    server.open.set()
    joined = Joined(server.send)
    await asyncio.gather(*(ask(joined, f"c{at}", n=30) for at in range(60)), ask(joined, "big", n=100))
    assert max(len(ids) for _, ids in server.asked) <= 512
    assert tuple(f"big.{at}" for at in range(100)) in [ids for _, ids in server.asked]
    assert sum(len(ids) for _, ids in server.asked) == 60 * 30 + 100


async def test_a_cancelled_caller_takes_nothing_from_the_others() -> None:
    """The request goes on for those that wait."""
    server = Server()
    joined = Joined(server.send)
    tasks = [asyncio.create_task(ask(joined, f"c{at}")) for at in range(6)]
    await loop_passes()
    tasks[0].cancel()
    await loop_passes()
    assert [len(ids) for _, ids in server.asked] == [2, 2, 8]
    tasks[3].cancel()
    await loop_passes()
    server.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [isinstance(answer, asyncio.CancelledError) for answer in answers]
    assert cancelled == [True, False, False, True, False, False]
    assert answers[-1] == ("c5.0", "c5.1")


async def test_a_request_that_nobody_waits_for_is_cancelled() -> None:
    """So its connection is closed, and a directory that hangs keeps none of them."""
    server = Server()
    joined = Joined(server.send)
    tasks = [asyncio.create_task(ask(joined, f"c{at}")) for at in range(5)]
    await loop_passes()
    server.open.clear()
    tasks[0].cancel()
    await loop_passes()
    assert [len(ids) for _, ids in server.asked] == [2, 2, 6]
    for task in tasks:
        task.cancel()
    await loop_passes()
    assert server.ended == 3
    server.open.set()
    assert await ask(joined, "later") == ("later.0", "later.1")


@pytest.mark.parametrize("key", ["p", "q"])
async def test_requests_that_hang_hold_up_no_other(key: str) -> None:
    """Whatever they wait for: what comes later, of their key or of another one, is sent, and together."""
    server = Server()
    joined = Joined(server.send)
    hanging = [asyncio.create_task(ask(joined, f"h{at}")) for at in range(2)]
    await loop_passes()
    tasks = [asyncio.create_task(ask(joined, f"c{at}", key)) for at in range(40)]
    async with asyncio.timeout(20):
        while len(server.asked) < 4:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert [len(ids) for _, ids in server.asked] == [2, 2, 64, 16]
    server.open.set()
    assert (await asyncio.gather(*hanging, *tasks))[-1] == ("c39.0", "c39.1")


async def test_an_error_is_raised_to_each_caller_as_its_own() -> None:
    """Layers write into errors, so two callers never have the same one; its cause stays."""
    server = Server()
    joined = Joined(server.send)
    tasks = [asyncio.create_task(ask(joined, f"c{at}")) for at in range(6)]
    await loop_passes()
    server.error = DataPlaneUnavailable("gone", host="h")
    server.error.__cause__ = OSError("why")
    server.open.set()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(err, DataPlaneUnavailable) and err.host == "h" for err in errors)
    assert all(isinstance(err, Exception) and isinstance(err.__cause__, OSError) for err in errors)
    assert len({id(err) for err in errors[2:]}) == 4


def test_another_loop_waits_for_nothing_of_the_first() -> None:
    """A loop that was ended while requests were on the way leaves no request counted."""
    server: list[Server] = []

    async def hang() -> Joined[str, str, Answer]:
        server.append(Server())
        joined = Joined(server[0].send)
        for at in range(4):
            asyncio.create_task(ask(joined, f"c{at}"))  # noqa: RUF006 - the end of the loop cancels them
        await loop_passes()
        return joined

    async def again(joined: Joined[str, str, Answer]) -> list[Answer]:
        server[0].open = asyncio.Event()
        server[0].open.set()
        return await asyncio.gather(*(ask(joined, f"d{at}") for at in range(4)))

    joined = asyncio.run(hang())
    assert asyncio.run(again(joined)) == [(f"d{at}.0", f"d{at}.1") for at in range(4)]


async def test_the_definitions_of_fields_are_kept_together() -> None:
    """Many callers that read the same fields share one mapping; unknown fields are left out; a bound on how many."""
    specs = {name: FieldSpec("object") for name in "ab"}
    schema = Schema(b"1", specs)
    assert schema.specs_of(("a", "c")) == {"a": specs["a"]}
    assert schema.specs_of(("a", "c")) is schema.specs_of(("a", "c"))
    for number in range(200):
        schema.specs_of((f"f{number}",))
    assert len(schema._specs) <= 64
    assert replace(schema, fields={}).specs_of(("a",)) == {}
