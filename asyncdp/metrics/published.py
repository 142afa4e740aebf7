"""What clients tell of themselves through the plane, so that one command sees all of them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio

from asyncdp.errors import DataPlaneBadRequest, DataPlaneError
from asyncdp.process.cancellation import finish

from .histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdp.client import Client


__all__ = ["PARTITION", "ClientReport", "Publisher", "read_reports"]

#: Partition that holds one row per client, without fields: the report is a tag.
PARTITION: Final = "__asyncdp__clients"
TAG: Final = "asyncdp_report"
#: Most characters of a report; of one that is longer, ports, retries and durations are left out.
LONGEST: Final = 16_384
#: Seconds after which the report of a client that is silent is removed.
FORGET_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class ClientReport:
    """What one client told.

    Attributes:
        owner: Its name at the plane.
        machine, pid: Where it runs.
        at: When it told, in unix seconds by its clock.
        ops: Calls by op and status, since the client was made.
        times: Durations of calls by op, as :meth:`~asyncdp.metrics.histogram.Histogram.to_plain` has them.
        retries: Attempts that were repeated, by reason.
        budget_refused: Retries that the budget did not allow.
        total_bytes: Payload bytes that it moved.
        ports: Ports that are not healthy: host, port, health, seconds left.
    """

    owner: str
    machine: str = ""
    pid: int = 0
    at: float = 0.0
    ops: dict[str, dict[str, int]] = field(default_factory=dict)
    times: dict[str, dict[str, int]] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    budget_refused: int = 0
    total_bytes: int = 0
    ports: list[tuple[str, int, str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, client: Client) -> ClientReport:
        """Return what a client has to tell now."""
        seen = client.snapshot()
        times: dict[str, Histogram] = {}
        for (op, _), histogram in client.call_times().items():
            times.setdefault(op, Histogram()).merge(histogram)
        retries: Counter[str] = Counter()
        for labels, number in seen["events_by"]["retry"].items():
            named = dict(label.split("=", 1) for label in labels.split(" ") if "=" in label)
            retries[named.get("reason", "?")] += number
        return cls(
            client.owner,
            socket.gethostname(),
            os.getpid(),
            time.time(),
            {op: dict(by) for op, by in seen["ops"].items()},
            {op: histogram.to_plain() for op, histogram in times.items()},
            dict(retries),
            seen["events"]["budget_refused"],
            seen["total_bytes"],
            [
                (p["host"], p["port"], p["health"], round(p["left_s"], 1))
                for p in seen["ports"]
                if p["health"] != "healthy"
            ],
        )

    def to_text(self) -> str:
        """Return it as JSON of at most ``LONGEST`` characters."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for without in ("", "ports", "retries", "times", "ops"):
            values.pop(without, None)
            text = json.dumps(values, separators=(",", ":"))
            if len(text) <= LONGEST:
                return text
        return json.dumps({"owner": self.owner, "at": self.at})

    @classmethod
    def from_text(cls, text: Any) -> ClientReport | None:
        """Return a report that a client published; None if it cannot be read, such as that of another release."""
        try:
            values: Mapping[str, Any] = json.loads(text)
            known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
            made = cls(**known)
        except (TypeError, ValueError):
            return None
        return made if isinstance(values["owner"], str) and isinstance(values.get("at"), (int, float)) else None


class Publisher:
    """Publishes what a client knows, for ``asyncdp top``; never fails, and costs one small put every few seconds.

    ::

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Publisher(client).run)

    Args:
        client: The client.
        every_s: Seconds between two reports.
        timeout_s: Seconds that a report may take.
    """

    def __init__(self, client: Client, *, every_s: float = 2.0, timeout_s: float = 5.0) -> None:
        """Publish nothing yet."""
        self._client = client
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._registered = False

    async def publish(self) -> bool:
        """Publish once; return whether it succeeded."""
        client, timeout_s = self._client, self._timeout_s
        try:
            if not self._registered:
                await client.register_partition(PARTITION, [], 0, [], timeout_s=timeout_s)
                self._registered = True
            report = ClientReport.of(client)
            await client.put_samples([report.owner], PARTITION, tags=[{TAG: report.to_text()}], timeout_s=timeout_s)
        except DataPlaneError:
            self._registered = False  # a plane that was restarted does not know the partition
            return False
        return True

    async def run(self) -> None:
        """Publish every few seconds until cancelled, then remove the report."""
        try:
            while True:
                await self.publish()
                await anyio.sleep(self._every_s)
        finally:
            await finish(self.withdraw, 1.0)

    async def withdraw(self) -> None:
        """Remove the report; nothing happens where that fails."""
        try:
            await self._client.evict([self._client.owner], PARTITION, timeout_s=1.0)
        except DataPlaneError:
            return


async def read_reports(client: Client, timeout_s: float = 5.0) -> list[ClientReport]:
    """Return the reports of all clients that publish, by owner; remove those of clients that have been silent long."""
    try:
        groups = await client.list_metadata(PARTITION, timeout_s=timeout_s)
    except DataPlaneBadRequest:  # nobody publishes
        return []
    found = [ClientReport.from_text(tags.get(TAG)) for group in groups for tags in group.tags]
    now = time.time()
    reports = [one for one in found if one is not None]
    old = [one.owner for one in reports if now - one.at > FORGET_S]
    if old:
        await client.evict(old, PARTITION, timeout_s=timeout_s)
    return sorted((one for one in reports if one.owner not in old), key=lambda one: one.owner)
