"""Drawings as inline SVG, whose colours are those of the site's theme: diagrams, and bars of measured tables."""

from __future__ import annotations

import inspect
import textwrap
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from docstrings import ROLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DOCS = Path(__file__).parents[1]


def drawing(what: str) -> str:
    """Return a drawing by name; ``bars PAGE.md: COLUMN, COLUMN`` draws columns of the table that has them."""
    name, _, rest = what.partition(" ")
    makers = {"stack": stack, "get": get, "put": put, "slot": slot, "deaths": deaths}
    return bars(rest) if name == "bars" else makers[name]()


def figure(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a figure of one SVG; it has no blank lines, so that Markdown takes it for one block."""
    head = f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(title)}">'
    tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0 0L8 4L0 8z"/></marker></defs>'
    body = "\n".join([head, tip, *parts, "</svg>"])
    return f'<figure class="drawing">\n{body}\n<figcaption>{escape(title)}</figcaption>\n</figure>'


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>'


def box(x: float, y: float, width: float, height: float, said: str, kind: str = "box") -> str:
    """Return a box with a word in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
    return shape + text(x + width / 2, y + height / 2 + 5, said, "name", "middle")


def arrow(*points: tuple[float, float], kind: str = "") -> str:
    """Return an arrow along points."""
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{way}" class="arrow {kind}" marker-end="url(#tip)"/>'


def stack() -> str:
    """Draw the default stack, with what the modules of the layers say."""
    from asyncdp.compose.composition import SlotMapping
    from asyncdp.factory import _BELOW_MAPPING, DEFAULT_LAYERS
    from asyncdp.middleware.metrics import Metrics

    above = [kind for kind in DEFAULT_LAYERS.values() if kind not in _BELOW_MAPPING]
    below = [kind for kind in DEFAULT_LAYERS.values() if kind in _BELOW_MAPPING]
    parts, y = [], 8.0

    def row(name: str, said: str, kind: str = "box") -> None:
        nonlocal y
        parts.append(box(96, y, 190, 34, name, kind))
        parts.extend(
            text(300, y + 21 - 8 * (len(lines) - 1) + 16 * i, line)
            for lines in [wrapped(said)]
            for i, line in enumerate(lines)
        )
        y += 46
        parts.append(arrow((191, y - 12), (191, y)))

    row("Client", "Checks the arguments of a verb, and makes a call with a deadline and an op_id of it.", "end")
    top = y
    for kind in (Metrics, *above, SlotMapping):
        row(kind.__name__, sentence(kind))
    middle = y
    for kind in below:
        row(kind.__name__, sentence(kind))
    parts += [
        box(96, y, 190, 34, "the transport", "end"),
        text(300, y + 21, "Talks to real storage: memory, TransferQueue, UCXX, or one of your own."),
    ]
    for start, end, said in ((top, middle, "samples"), (middle, y, "slots")):
        parts += [
            f'<path d="M88 {start}H80V{end - 12}H88" class="line"/>',
            text(72, (start + end) / 2, said, "", "end"),
        ]
    return figure(900, int(y) + 44, "The stack: each layer is a service around the one below it", parts)


def wrapped(said: str, width: int = 84) -> list[str]:
    """Return a sentence in lines."""
    return textwrap.wrap(said, width)


def sentence(kind: type) -> str:
    """Return the first sentence of a class, without quotes and roles."""
    first = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())
    return ROLE.sub(r"\1", first).replace("`", "")


def sequence(title: str, who: Sequence[str], steps: Sequence[tuple[int, int, str]]) -> str:
    """Draw who sends what to whom; a step from one to itself is work."""
    gap, left = 190, 90
    at = [left + gap * i for i in range(len(who))]
    height = 56 + 36 * len(steps)
    parts = [f'<path d="M{x} 40V{height}" class="life"/>' for x in at]
    parts += [box(x - 75, 6, 150, 34, name, "end") for x, name in zip(at, who, strict=True)]
    for i, (start, end, said) in enumerate(steps):
        y = 70 + 36 * i
        if start == end:
            parts += [
                f'<rect x="{at[start] - 5}" y="{y - 14}" width="10" height="22" class="work"/>',
                text(at[start] + 12, y + 2, said),
            ]
        else:
            parts += [arrow((at[start], y), (at[end], y), kind="" if start < end else "back")]
            parts += [text((at[start] + at[end]) / 2, y - 5, said, "", "middle")]
    return figure(left + gap * (len(who) - 1) + 170, height + 6, title, parts)


def get() -> str:
    """Draw a get."""
    return sequence(
        "The way of one get: every arrow to the right goes through the layers below SlotMapping",
        ("the program", "client, layers", "directory", "slot host a", "slot host b"),
        (
            (0, 1, "get_data(meta)"),
            (1, 2, "Locate: ids, handles"),
            (2, 1, "slots, or errors per row"),
            (1, 3, "ReadSlots (all hosts at once)"),
            (1, 4, "ReadSlots"),
            (3, 1, "payload, or errors per slot"),
            (4, 1, "payload, or errors per slot"),
            (1, 1, "verify: length, schema, checksum; put together"),
            (1, 0, "TensorDict"),
        ),
    )


def put() -> str:
    """Draw a put."""
    return sequence(
        "The way of one put: before Publish nothing of it can be seen, and after it all of it",
        ("the program", "client, layers", "directory", "slot host"),
        (
            (0, 1, "put_samples"),
            (1, 2, "Place"),
            (2, 1, "hosts with room, types of fields"),
            (1, 3, "Reserve: sizes"),
            (3, 1, "slots, or: full"),
            (1, 3, "WriteSlots: payload"),
            (3, 1, "written"),
            (1, 2, "Publish: rows, tags, op_id"),
            (2, 2, "all rows, or none; once per op_id"),
            (2, 1, "who was written, who is new"),
            (1, 0, "KVBatchMeta"),
        ),
    )


def slot() -> str:
    """Draw the states of a slot."""
    return figure(
        820,
        270,
        "The life of a slot: it is never taken back by time alone",
        [
            box(20, 60, 110, 44, "FREE", "end"),
            box(270, 60, 120, 44, "WRITING"),
            box(590, 60, 110, 44, "READY"),
            box(270, 200, 120, 44, "GIVEN_UP"),
            arrow((130, 82), (270, 82)),
            text(200, 74, "Reserve", "", "middle"),
            arrow((390, 82), (590, 82)),
            text(490, 58, "the writer is done;", "", "middle"),
            text(490, 74, "lengths and schema fit", "", "middle"),
            arrow((645, 60), (645, 20), (75, 20), (75, 60)),
            text(360, 14, "all rows died, and no read attempt is left", "", "middle"),
            arrow((350, 104), (350, 200)),
            text(360, 150, "Abort, while it may still be written"),
            arrow((300, 104), (300, 130), (100, 130), (100, 104)),
            text(200, 146, "its writer can write no more", "", "middle"),
            arrow((270, 222), (55, 222), (55, 104)),
            text(160, 214, "the writer is done, or dead", "", "middle"),
            arrow((700, 72), (740, 72), (740, 94), (702, 94)),
            text(748, 80, "read attempts,"),
            text(748, 96, "each ends once"),
        ],
    )


#: What dies; what follows as (word, width, kind); what becomes of its rows.
DEATHS: tuple[tuple[str, tuple[tuple[str, int, str], ...], str], ...] = (
    (
        "rollout worker",
        (("its group is incomplete", 190, "away"), ("evicted; rolled out again", 190, "good")),
        "nothing that was committed is lost",
    ),
    (
        "consumer with claims",
        (("its claims stay", 190, "away"), ("released: others claim", 190, "good")),
        "nothing is lost",
    ),
    (
        "trainer after its journal",
        (("its groups stay", 190, "away"), ("popped by the controller", 190, "good")),
        "nothing is trained on twice",
    ),
    ("a port of a slot host", (("other ports", 380, "good"),), "nothing is lost"),
    (
        "slot host, started again",
        (("calls wait", 190, "away"), ("the same rows", 190, "good")),
        "nothing acknowledged is lost",
    ),
    (
        "slot host, for good",
        (("calls wait", 190, "away"), ("its rows are lost_keys", 190, "bad")),
        "its rows are lost, by name",
    ),
    ("TransferQueue storage unit", (("its rows are lost_keys", 380, "bad"),), "its rows are lost, by name"),
    (
        "directory, with its log",
        (("calls wait", 190, "away"), ("rows, claims, tags", 190, "good")),
        "nothing acknowledged is lost",
    ),
    ("TransferQueue controller", (("all calls: DataPlaneUnavailable", 380, "bad"),), "all rows are lost"),
)


def deaths() -> str:
    """Draw what died and what comes back."""
    parts = [text(210, 20, "it dies", "", "middle"), text(610, 20, "then"), '<path d="M210 26V356" class="life"/>']
    for i, (who, spans, rest) in enumerate(DEATHS):
        y, x = 34 + 36 * i, 210.0
        parts += [text(150, y + 18, who, "", "end"), f'<rect x="158" y="{y}" width="52" height="26" class="good"/>']
        for said, width, kind in spans:
            parts += [
                f'<rect x="{x:g}" y="{y}" width="{width}" height="26" class="{kind}"/>',
                text(x + width / 2, y + 18, said, "", "middle"),
            ]
            x += width
        parts.append(text(610, y + 18, rest))
    return figure(830, 366, "What died, and what comes back; time goes to the right", parts)


def bars(what: str) -> str:
    """Draw columns of a table of a page as bars, row by row."""
    page, _, names = what.partition(": ")
    wanted = names.split(", ")
    lines = (DOCS / page).read_text().splitlines()
    start = next(
        i for i, line in enumerate(lines) if line.startswith("| ") and all(f"| {name} |" in line for name in wanted)
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:] if line.startswith("|")]
    head, body = cells[0], []
    for line, row in zip(lines[start + 2 :], cells[2:], strict=False):
        if not line.startswith("|"):
            break
        body.append(row)
    columns = [i for name in dict.fromkeys(wanted) for i, found in enumerate(head) if found == name]
    most = max(float(row[i]) for row in body for i in columns)
    parts, y = [], 10.0
    for row in body:
        for number, i in enumerate(columns):
            label = row[0] if len(columns) == 1 else f"{row[0]}, {head[i - 1]}"
            value = max(0.0, float(row[i]))
            parts += [
                text(250, y + 14, label, "", "end"),
                f'<rect x="258" y="{y:g}" width="{value / most * 420:.0f}" height="18" class="bar{number}"/>',
            ]
            parts.append(text(264 + value / most * 420, y + 14, row[i]))
            y += 24
    return figure(760, int(y) + 4, f"{wanted[0]}, from the table in {page}", parts)
