"""Collects what ``asyncdp top`` shows, as plain values; both views are made of it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from asyncdp.cli.tables import age, size
from asyncdp.errors import DataPlaneError
from asyncdp.metrics.histogram import Histogram
from asyncdp.metrics.published import PARTITION, ClientReport, read_reports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdp.client import Client
    from asyncdp.meta import DataPlaneGroupMeta, HostStatus

__all__ = ["Overviews"]

#: Samples of a partition from which its groups are not listed, since that takes seconds.
LISTED = 20_000
#: Part of the shared memory of a host that counts as full.
FULL = 0.9
#: Seconds after which a claim is old, and after which the report of a client is.
OLD_CLAIM_S, SILENT_S = 600.0, 15.0
#: Calls that may wait; that their time is over, since too little came, is no failure.
WAITING = ("claim_meta", "wait_partition")

Overview = dict[str, Any]


class Overviews:
    """Looks at a plane again and again.

    Args:
        client: A client of the plane.
        timeout_s: Seconds that each question may take.
    """

    def __init__(self, client: Client, timeout_s: float = 5.0) -> None:
        """Begin with nothing seen."""
        self._client = client
        self._timeout_s = timeout_s
        self._before: dict[str, ClientReport] = {}
        self._rates: dict[str, _Rates] = {}
        self.latest: Overview = _nothing()

    async def look(self) -> Overview:
        """Look once; return what was seen. Where the plane does not answer, the last view with the error."""
        began = time.monotonic()
        try:
            await self._client.ping(timeout_s=self._timeout_s)
            pinged_ms = (time.monotonic() - began) * 1e3
            seen = await self._seen()
            seen["plane"] = {"answers": True, "error": "", "ms": round(pinged_ms, 2)}
        except DataPlaneError as err:
            seen = {**self.latest, "plane": {"answers": False, "error": f"{type(err).__name__}: {err}", "ms": None}}
        seen["at"] = time.time()
        seen["wrong"] = _wrong(seen)
        self.latest = seen
        return seen

    async def _seen(self) -> Overview:
        client, timeout_s = self._client, self._timeout_s
        hosts = await client.list_hosts(timeout_s=timeout_s) if client.get_capabilities().host_listing else []
        partitions, claims = [], []
        for info in await client.list_partitions(timeout_s=timeout_s):
            if info.partition_id == PARTITION:
                continue
            groups = None
            if info.size <= LISTED:
                groups = await client.list_metadata(info.partition_id, timeout_s=timeout_s)
            ready = await client.depth(info.partition_id, timeout_s=timeout_s)
            partitions.append(
                {
                    "partition": info.partition_id,
                    "samples": info.size,
                    "bytes": info.size_bytes,
                    "ready": ready,
                    **_of_groups(groups),
                }
            )
            for task in info.consumer_tasks:
                held = await client.list_claims(info.partition_id, task, timeout_s=timeout_s)
                claims += _by_owner(info.partition_id, task, held)
        reports = await read_reports(client, timeout_s)
        return {
            "hosts": [_host(host) for host in hosts],
            "partitions": sorted(partitions, key=lambda one: str(one["partition"])),
            "claims": sorted(claims, key=lambda one: -one["oldest_s"]),
            **self._of_clients(reports),
        }

    def _of_clients(self, reports: list[ClientReport]) -> Overview:
        now = time.time()
        for report in reports:
            before = self._before.get(report.owner)
            if before is None or report.at > before.at:
                self._rates[report.owner] = _Rates.between(before, report)
                self._before[report.owner] = report
        there = {report.owner for report in reports}
        self._rates = {owner: rates for owner, rates in self._rates.items() if owner in there}
        self._before = {owner: report for owner, report in self._before.items() if owner in there}
        calls: defaultdict[str, float] = defaultdict(float)
        failed: defaultdict[str, float] = defaultdict(float)
        retried: defaultdict[str, float] = defaultdict(float)
        times: dict[str, Histogram] = {}
        for owner, rates in self._rates.items():
            if now - self._before[owner].at > SILENT_S:
                continue
            for total, part in ((calls, rates.calls), (failed, rates.failed), (retried, rates.retries)):
                for name, per_s in part.items():
                    total[name] += per_s
            for op, counts in rates.times.items():
                times.setdefault(op, Histogram()).merge_plain(counts)
        ops = [
            {
                "op": op,
                "per_s": round(per_s, 2),
                "failed_per_s": round(failed[op], 2),
                **{
                    f"p{percent}_ms": round(times[op].quantile(percent / 100) * 1e3, 3) if op in times else None
                    for percent in (50, 90, 99)
                },
            }
            for op, per_s in sorted(calls.items(), key=lambda one: -one[1])
        ]
        totals: Counter[str] = Counter()
        for report in reports:
            totals.update(report.retries)
        return {
            "clients": [
                {
                    "owner": report.owner,
                    "machine": report.machine,
                    "pid": report.pid,
                    "silent_s": round(max(0.0, now - report.at), 1),
                    "per_s": round(sum(rates.calls.values()), 2),
                    "bytes_per_s": round(rates.bytes_per_s),
                    "budget_refused": report.budget_refused,
                }
                for report in reports
                for rates in [self._rates[report.owner] if now - report.at <= SILENT_S else _Rates()]
            ],
            "ops": ops,
            "ports": _ports(reports, now),
            "retries": [
                {"reason": reason, "per_s": round(retried[reason], 2), "total": total}
                for reason, total in totals.most_common()
            ],
        }


def _ports(reports: list[ClientReport], now: float) -> list[dict[str, Any]]:
    """Return the ports that clients find ill, each once, with the number of these clients."""
    ports: dict[tuple[str, int], dict[str, Any]] = {}
    for report in reports:
        for host, port, health, left_s in report.ports:
            new = {"host": host, "port": port, "health": health, "clients": 0, "left_s": 0.0}
            seen = ports.setdefault((host, port), new)
            seen["clients"] += 1
            seen["left_s"] = round(max(seen["left_s"], left_s - (now - report.at)), 1)
    return list(ports.values())


class _Rates:
    """What one client did a second between its last two reports, and how long its calls took meanwhile."""

    def __init__(self) -> None:
        self.calls: defaultdict[str, float] = defaultdict(float)
        self.failed: defaultdict[str, float] = defaultdict(float)
        self.retries: defaultdict[str, float] = defaultdict(float)
        self.times: dict[str, dict[str, int]] = {}
        self.bytes_per_s = 0.0

    @classmethod
    def between(cls, before: ClientReport | None, now: ClientReport) -> _Rates:
        rates = cls()
        if before is None or now.at <= before.at or now.pid != before.pid:
            rates.times = now.times
            return rates
        seconds = now.at - before.at
        rates.bytes_per_s = max(0, now.total_bytes - before.total_bytes) / seconds
        for op, by in now.ops.items():
            for status, number in by.items():
                new = max(0, number - before.ops.get(op, {}).get(status, 0)) / seconds
                rates.calls[op] += new
                if status == "error" or (status == "timeout" and op not in WAITING):
                    rates.failed[op] += new
        for reason, number in now.retries.items():
            rates.retries[reason] += max(0, number - before.retries.get(reason, 0)) / seconds
        for op, counts in now.times.items():
            old = before.times.get(op, {})
            fresh = {at: number - old.get(at, 0) for at, number in counts.items() if number > old.get(at, 0)}
            rates.times[op] = fresh or counts
        return rates


def _nothing() -> Overview:
    lists = ("hosts", "partitions", "claims", "clients", "ops", "ports", "retries", "wrong")
    return {"at": 0.0, "plane": {"answers": False, "error": "", "ms": None}, **{name: [] for name in lists}}


def _host(host: HostStatus) -> dict[str, Any]:
    used = None
    if host.capacity_bytes is not None and host.free_bytes is not None:
        used = host.capacity_bytes - host.free_bytes
    return {
        "host": host.host_id,
        "state": "silent" if not host.alive else "draining" if host.draining else "answers",
        "used_bytes": used,
        "capacity_bytes": host.capacity_bytes,
        "rows": host.rows,
        "slots": host.slots,
        "supervised": host.supervised,
        "heartbeat_age_s": None if host.heartbeat_age_s is None else round(host.heartbeat_age_s, 1),
    }


def _of_groups(groups: list[DataPlaneGroupMeta] | None) -> dict[str, Any]:
    """Return groups and bytes by weight version, and the rows that are lost; None where they were not listed."""
    if groups is None:
        return {"groups": None, "lost": None, "oldest_s": None, "versions": []}
    by: dict[int | None, list[int]] = {}
    for group in groups:
        one = by.setdefault(group.weight_version, [0, 0])
        one[0] += 1
        one[1] += group.size_bytes
    versions = sorted(by.items(), key=lambda one: -1 if one[0] is None else one[0], reverse=True)
    return {
        "groups": len(groups),
        "lost": sum(len(group.lost_keys) for group in groups),
        "oldest_s": round(max(0.0, time.time() - groups[0].created_at), 1) if groups else None,
        "versions": [{"version": version, "groups": n, "bytes": nbytes} for version, (n, nbytes) in versions],
    }


def _by_owner(partition: str, task: str, claims: Any) -> list[dict[str, Any]]:
    now = time.time()
    by: dict[str, dict[str, Any]] = {}
    for claim in claims:
        new = {"partition": partition, "task": task, "owner": claim.owner, "claims": 0, "samples": 0, "oldest_s": 0.0}
        one = by.setdefault(claim.owner, new)
        one["claims"] += 1
        one["samples"] += len(claim.sample_ids)
        one["oldest_s"] = round(max(one["oldest_s"], now - claim.claimed_at), 1)
    return list(by.values())


def _wrong(seen: Overview) -> list[str]:
    """Return what is wrong, worst first, each in one sentence."""
    out = [] if seen["plane"]["answers"] else [f"The plane does not answer: {seen['plane']['error']}"]
    hosts = seen["hosts"]
    for host in hosts:
        if host["state"] == "silent":
            again = " until its supervisor has started it again" * host["supervised"]
            out.append(f"Host {host['host']} does not answer: its rows cannot be read{again}.")
    lost = ((one["partition"], one["lost"]) for one in seen["partitions"] if one["lost"])
    help_ = _help_for_lost(hosts)
    out += [
        f"{rows} row{'s' * (rows != 1)} of partition {name} cannot be read: {help_}asyncdp evict {name} --lost gives"
        " them up."
        for name, rows in lost
    ]
    full = (
        host for host in hosts if host["capacity_bytes"] and (host["used_bytes"] or 0) > FULL * host["capacity_bytes"]
    )
    for host in full:
        part = f"{host['used_bytes'] / host['capacity_bytes']:.0%} of {size(host['capacity_bytes'])}"
        out.append(f"Host {host['host']} is nearly full: {part}; puts will have to wait.")
    return out + _wrong_of_clients(seen)


def _help_for_lost(hosts: list[dict[str, Any]]) -> str:
    """Return what to do before rows that cannot be read are given up; empty where nothing brings them back."""
    silent = [host for host in hosts if host["state"] == "silent"]
    if any(host["supervised"] for host in silent):
        first = "wait until their host has been started again"
    elif any(host["slots"] for host in silent):
        first = "start their host again under its name"
    elif any(host["slots"] for host in hosts) or not hosts:  # it was started again just now, or is not registered
        first = "look again in a few seconds, or start the host that is missing here under its name"
    else:
        return "their storage unit does not come back; "  # of TransferQueue
    return f"{first}; as a last resort, "


def _quarantines(ports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each host of which clients avoid ports."""
    by: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for port in ports:
        if port["health"] == "quarantined" and port["left_s"]:  # else it was until just now
            by[port["host"]].append(port)
    for host, avoided in by.items():
        names = ", ".join(str(port["port"]) for port in sorted(avoided, key=lambda one: int(one["port"])))
        are = "Ports {} of {} are" if len(avoided) > 1 else "Port {} of {} is"
        clients = max(port["clients"] for port in avoided)
        left = age(max(port["left_s"] for port in avoided))
        yield f"{are.format(names, host)} quarantined by {clients} client{'s' * (clients > 1)}, for {left} more."


def _wrong_of_clients(seen: Overview) -> list[str]:
    out = list(_quarantines(seen["ports"]))
    failing = (one for one in seen["ops"] if one["failed_per_s"])
    out += [f"{one['failed_per_s']:g} calls of {one['op']} fail each second, of {one['per_s']:g}." for one in failing]
    for claim in seen["claims"]:
        if claim["oldest_s"] > OLD_CLAIM_S:
            held = f"{claim['owner']} has held samples of {claim['partition']} for {age(claim['oldest_s'])}"
            out.append(f"{held}: asyncdp release {claim['partition']} --owner {claim['owner']}, if it is dead.")
    silent = [one for one in seen["clients"] if one["silent_s"] > SILENT_S]
    if silent:
        names = ", ".join(one["owner"] for one in silent)
        least = age(min(one["silent_s"] for one in silent))
        clients = f"Client {names} has" if len(silent) == 1 else f"{len(silent)} clients have"
        out.append(f"{clients} published nothing for {least}{f': {names}' if len(silent) > 1 else ''}.")
    return out
