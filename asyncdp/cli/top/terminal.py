"""``asyncdp top`` in the terminal."""

from __future__ import annotations

import time
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from asyncdp.cli.tables import age, count, cut, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from .overview import Overview

__all__ = ["screen"]

#: Most lines that say what is wrong.
WRONG_SHOWN = 6
#: Lines that one of them may take.
LINES_OF_ONE = 3
TIMES = ("p50", "p90", "p99")


def screen(seen: Overview, width: int, height: int = 1000) -> RenderableType:
    """Return what is shown of an overview: what is wrong first, then the rest as far as there is room."""
    plane, wrong = seen["plane"], seen["wrong"]
    answers = f"answers, {plane['ms']:.1f} ms" if plane["answers"] else "DOES NOT ANSWER"
    clock = time.strftime("%H:%M:%S", time.localtime(seen["at"]))
    head = Text(cut(f"asyncdp top  {clock}  plane {answers}  {len(seen['clients'])} clients  Ctrl-C ends", width))
    out: list[RenderableType] = [head]
    for line in wrong[:WRONG_SHOWN]:
        parts = wrap(f"! {line}", width, subsequent_indent="  ", max_lines=LINES_OF_ONE, placeholder=" …")
        out += [Text(part, style="bold red") for part in parts]
    if len(wrong) > WRONG_SHOWN:
        out.append(Text(f"! and {len(wrong) - WRONG_SHOWN} more", style="bold red"))
    if not wrong:
        out.append(Text("nothing is wrong", style="green"))
    left = height - len(out) - 1  # a line is kept for the names of what has no room
    without = []
    for title, columns, rows, right in _sections(seen):
        room = left - 2
        if rows and room < min(len(rows), 2):
            without.append(title)
        elif rows:
            shown = rows if len(rows) <= room else rows[: room - 1]
            told = [at for at in range(len(columns)) if any(row[at] != "-" for row in rows)]
            cells = [[row[at] for at in told] for row in shown]
            out += [Text(title, style="bold cyan"), table([columns[at] for at in told], cells, right=right)]
            left = room - len(shown)
            if len(shown) < len(rows):
                out.append(Text(f"and {len(rows) - len(shown)} more", style="dim"))
                left -= 1
    if without:
        out.append(Text(cut(f"no room for: {', '.join(without)}", width), style="dim"))
    return Group(*out)


def _sections(seen: Overview) -> Sequence[tuple[str, tuple[str, ...], list[tuple[Any, ...]], tuple[str, ...]]]:
    ops = [
        (one["op"], f"{one['per_s']:g}", f"{one['failed_per_s']:g}", *(_ms(one[f"p{p}_ms"]) for p in (50, 90, 99)))
        for one in [op for op in seen["ops"] if op["per_s"]] or seen["ops"]  # what is called now, where that is known
    ]
    partitions = [
        (
            *(one["partition"], count(one["samples"]), size(one["bytes"]), count(one["groups"]), count(one["ready"])),
            *(one["lost"] or "-", age(one["oldest_s"]), _versions(one["versions"])),
        )
        for one in seen["partitions"]
    ]
    hosts = [
        (one["host"], one["state"], _fill(one), count(one["rows"]), _slots(one["slots"]), age(one["heartbeat_age_s"]))
        for one in seen["hosts"]
    ]
    ports = [
        (*(one["host"], one["port"], one["health"].replace("_", " "), one["clients"]), age(one["left_s"] or None))
        for one in seen["ports"]
    ]
    claims = [
        (one["partition"], one["task"], one["owner"], count(one["samples"]), age(one["oldest_s"]))
        for one in seen["claims"]
    ]
    retries = [(one["reason"], f"{one['per_s']:g}", count(one["total"])) for one in seen["retries"]]
    clients = [
        (
            *(one["owner"], f"{one['per_s']:g}", f"{size(one['bytes_per_s'])}/s", one["budget_refused"] or "-"),
            age(one["silent_s"]),
        )
        for one in seen["clients"]
    ]
    return (
        ("Calls", ("op", "per s", "failed per s", *TIMES), ops, ("per s", "failed per s", *TIMES)),
        (
            "Partitions",
            ("partition", "samples", "size", "groups", "ready", "lost", "oldest", "groups by version"),
            partitions,
            ("samples", "size", "groups", "ready", "lost", "oldest"),
        ),
        ("Hosts", ("host", "state", "used", "rows", "slots", "heartbeat"), hosts, ("used", "rows", "heartbeat")),
        (
            "Ports that are not healthy",
            ("host", "port", "health", "clients", "time left"),
            ports,
            ("port", "clients", "time left"),
        ),
        ("Claims", ("partition", "task", "owner", "samples", "oldest"), claims, ("samples", "oldest")),
        ("Retries", ("reason", "per s", "in all"), retries, ("per s", "in all")),
        (
            "Clients",
            ("owner", "calls/s", "payload", "retries refused", "last report"),
            clients,
            ("calls/s", "payload", "retries refused", "last report"),
        ),
    )


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms" if value < 1000 else age(value / 1e3)  # noqa: PLR2004


def _versions(versions: list[dict[str, Any]]) -> str:
    shown = " ".join(f"{'-' if one['version'] is None else one['version']}:{one['groups']}" for one in versions[:3])
    return f"{shown} …" if len(versions) > 3 else shown or "-"  # noqa: PLR2004 - as many as are shown


def _slots(slots: dict[str, int]) -> str:
    return ", ".join(f"{count(n)} {name}" for name, n in slots.items() if n) or ("0" if slots else "-")


def _fill(host: dict[str, Any]) -> str:
    if not host["capacity_bytes"] or host["used_bytes"] is None:
        return "-"
    return f"{host['used_bytes'] / host['capacity_bytes']:.0%} of {size(host['capacity_bytes'])}"
