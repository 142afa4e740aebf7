"""Every verb at once, each on samples of its own; and whether what was acknowledged holds afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncdp import DataPlaneError, PartialReadError, SampleNotFound
from asyncdp.testing.verbs import VERBS, Arguments

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["KEPT", "TIMEOUT_S", "Round", "check_kept", "fill"]

ROWS = 64
TIMEOUT_S = 8.0
#: Put at the beginning; row number n holds n.
KEPT = [f"k{at}" for at in range(ROWS)]


@dataclass
class Round:
    """One fault's samples, and how each verb ended.

    Attributes:
        number: Which fault it is; values that are put in it are this number.
        outcomes: How each verb ended: "ok", or the error's class.
        untyped: What left the client and was no DataPlaneError.
        slowest_s: The longest that a verb took.
        wrong: What does not hold afterwards, though it was acknowledged; empty where all is well.
    """

    number: int
    outcomes: dict[str, str] = field(default_factory=dict)
    untyped: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    claimed: list[str] = field(default_factory=list)
    held: Any = None
    given: Any = None

    def id(self, what: str) -> str:
        """Return the id of a sample of this round."""
        return f"{self.number}-{what}"

    async def prepare(self, client: Client) -> None:
        """Put what verbs of this round will remove, read or release."""
        extra = [self.id(what) for what in ("clear", "pop", "evict")]
        await client.put_samples(extra, "p", {"x": torch.zeros(3)})
        await client.register_partition("other", [], 1, [])
        self.held = await client.claim_meta("p", "held", ["x"], 2)
        self.given = await client.claim_meta("p", "held", ["x"], 2)

    async def run(self, client: Client) -> None:
        """Send every verb at once, and note how each ends."""

        async def one(name: str) -> None:
            began = time.monotonic()
            try:
                verb, arguments = CALLS[name]
                answer = await VERBS[verb](client, TIMEOUT_S, ABOUT, **arguments(self))
                self.outcomes[name] = "ok"
                if name == "claim_meta":
                    self.claimed = list(answer.sample_ids)
            except DataPlaneError as err:
                self.outcomes[name] = type(err).__name__
            except Exception as err:  # noqa: BLE001 - what this is looking for
                self.outcomes[name] = type(err).__name__
                self.untyped.append(f"{name}: {err!r}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

        async with anyio.create_task_group() as group:
            for name in CALLS:
                group.start_soon(one, name)

    async def check(self, client: Client, lost: set[str]) -> None:
        """Compare the plane with what was acknowledged; rows in ``lost`` lay on a unit that is dead."""

        async def value(sample_id: str) -> Any:
            try:
                return (await client.get_samples([sample_id], "p", ["x"], timeout_s=TIMEOUT_S))["x"].tolist()[0]
            except SampleNotFound:
                return None
            except DataPlaneError as err:
                return type(err).__name__

        def expect(true: bool, text: str) -> None:  # noqa: FBT001 - reads like the check it is
            if not true:
                self.wrong.append(text)

        new = await value(self.id("new"))
        if self.outcomes["put_samples"] == "ok":
            expect(new == self.number or self.id("new") in lost, f"an acknowledged put reads {new}")
        else:
            expect(new in (None, self.number) or self.id("new") in lost, f"a put that failed reads {new}")
        pair = [await value("r0"), await value("r1")]
        if lost.isdisjoint(("r0", "r1")):
            expect(pair[0] == pair[1], f"half a replacement is there: {pair}")
            expect(self.outcomes["replace"] != "ok" or pair[0] == self.number, f"a replacement reads {pair}")
        for verb, what in (("clear_samples", "clear"), ("pop", "pop"), ("evict", "evict")):
            there = await value(self.id(what))
            expect(self.outcomes[verb] != "ok" or there is None, f"{verb} was acknowledged, and it reads {there}")
        groups = {group.group_id: group for group in await client.list_metadata("p")}
        if self.outcomes["tags"] == "ok":
            told = (groups["r0"].tags or ({},))[0] if "r0" in groups else {}
            expect("r0" in lost or told.get(self.id("tag")) == 1, "an acknowledged tag is not there")
        by_task = {
            task: {i for claim in await client.list_claims("p", task) for i in claim.sample_ids}
            for task in ("train", "held")
        }
        expect(set(self.claimed) <= by_task["train"], "an acknowledged claim is not listed")
        released = self.outcomes["release_claim"] == "ok"
        expect(not released or by_task["held"].isdisjoint(self.given.sample_ids), "a released claim is listed")


#: Each call: the verb, and the arguments that are its own, as a function of the round; most are those of all verbs.
CALLS: dict[str, tuple[str, Callable[[Round], dict[str, Any]]]] = {
    **{name: (name, lambda _: {}) for name in VERBS},
    "put_samples": ("put_samples", lambda r: {"put": [r.id("new")], "values": float(r.number)}),
    "replace": ("put_samples", lambda r: {"put": ["r0", "r1"], "values": float(r.number)}),
    "tags": ("put_samples", lambda r: {"put": ["r0"], "values": None, "tags": [{r.id("tag"): 1}]}),
    "clear_samples": ("clear_samples", lambda r: {"remove": [r.id("clear")]}),
    "pop": ("pop", lambda r: {"remove": [r.id("pop")]}),
    "evict": ("evict", lambda r: {"remove": [r.id("evict")]}),
    "get_data": ("get_data", lambda r: {"batch": r.held}),
    "release_claim": ("release_claim", lambda r: {"claim": r.given}),
}
ABOUT = Arguments(new_field="x", read=KEPT, size=4, least=1, drop="other")


async def fill(client: Client) -> None:
    """Put what is checked after each fault."""
    await client.register_partition("p", ["x"], ROWS, ["train", "held"])
    await client.put_samples(KEPT, "p", {"x": torch.arange(float(ROWS))})
    await client.put_samples(["r0", "r1"], "p", {"x": torch.zeros(2)})


async def check_kept(client: Client) -> tuple[int, set[str]]:
    """Read what was acknowledged at the beginning; return how many rows came, and which are named as lost.

    None may be wrong, and none may be missing without a name.
    """
    came = list(KEPT)
    lost: list[str] = []
    try:
        rows = await client.get_samples(KEPT, "p", ["x"], timeout_s=TIMEOUT_S)
    except PartialReadError as err:
        rows, came, lost = err.rows, err.ok.sample_ids, err.failed.sample_ids
    assert rows["x"].tolist() == [int(i[1:]) for i in came], "a row came with another one's value"
    assert sorted(came + lost) == sorted(KEPT)
    return len(came), set(lost)
