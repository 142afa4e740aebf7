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


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle, such as a bar."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, said: str, kind: str = "box") -> str:
    """Return a box with a word in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
    return shape + text(x + width / 2, y + height / 2 + 5, said, "name", "middle")


def arrow(*points: tuple[float, float], kind: str = "") -> str:
    """Return an arrow along points."""
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{way}" class="arrow {kind}" marker-end="url(#tip)"/>'


def stack() -> str:
    """Draw the default stack, with what the layers say of themselves."""
    from asyncdp.layering import BELOW_MAPPING, DEFAULT_LAYERS
    from asyncdp.middleware.metrics import Metrics

    above = [Metrics, *(kind for kind in DEFAULT_LAYERS.values() if kind not in BELOW_MAPPING)]
    below = [kind for kind in DEFAULT_LAYERS.values() if kind in BELOW_MAPPING]
    rows = [
        ("Client", "Checks the arguments of a verb, and makes a call of it, with a deadline and an op_id."),
        *((kind.__name__, sentence(kind)) for kind in (*above, *below)),
        ("the transport", "Talks to real storage: memory, TransferQueue, UCXX, or one of your own."),
    ]
    parts, step = [], 60
    for i, (name, said) in enumerate(rows):
        y, lines = 8 + step * i, textwrap.wrap(said, 62)
        parts.append(box(74, y, 136, 36, name, "end" if i in (0, len(rows) - 1) else "box"))
        parts += [text(224, y + 23 - 8 * (len(lines) - 1) + 16 * j, line) for j, line in enumerate(lines)]
        if i:
            parts.append(arrow((142, y - step + 36), (142, y)))
    ends = (1, len(above) + 1, len(rows) - 1)
    for start, end, said in zip(ends, ends[1:], ("samples", "slots"), strict=False):
        top, bottom = 8 + step * start, 8 + step * (end - 1) + 36
        parts.append(f'<path d="M68 {top}H60V{bottom}H68" class="line"/>')
        parts.append(text(54, (top + bottom) / 2, said, "", "end"))
    return figure(690, 8 + step * len(rows), "The stack: each layer is a service around the one below it", parts)


def sentence(kind: type) -> str:
    """Return the first sentence of a class, without quotes and roles."""
    first = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())
    return ROLE.sub(r"\1", first).replace("`", "")


def sequence(title: str, who: Sequence[str], steps: Sequence[tuple[int, int, str]]) -> str:
    """Draw who sends what to whom; a step from one to itself is work."""
    left, gap = 66, 600 // (len(who) - 1)
    at = [left + gap * i for i in range(len(who))]
    height = 56 + 36 * len(steps)
    parts = [f'<path d="M{x} 40V{height}" class="life"/>' for x in at]
    parts += [box(x - 62, 6, 124, 34, name, "end") for x, name in zip(at, who, strict=True)]
    for i, (start, end, said) in enumerate(steps):
        y = 70 + 36 * i
        if start == end:
            parts += [rect(at[start] - 5, y - 14, 10, 22, "work"), text(at[start] + 12, y + 2, said)]
        else:
            parts += [arrow((at[start], y), (at[end], y), kind="" if start < end else "back")]
            parts += [text((at[start] + at[end]) / 2, y - 5, said, "over", "middle")]
    return figure(max(690, left + gap * (len(who) - 1) + 66), height + 6, title, parts)


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
            (1, 1, "verify length, schema, checksum; put together"),
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
        700,
        280,
        "The life of a slot: it is never taken back by time alone",
        [
            box(10, 64, 100, 44, "FREE", "end"),
            box(230, 64, 110, 44, "WRITING"),
            box(510, 64, 100, 44, "READY"),
            box(230, 214, 110, 44, "GIVEN_UP"),
            arrow((110, 86), (230, 86)),
            text(170, 78, "Reserve", "", "middle"),
            arrow((340, 86), (510, 86)),
            text(425, 62, "the writer is done;", "", "middle"),
            text(425, 78, "lengths and schema fit", "", "middle"),
            arrow((560, 64), (560, 24), (60, 24), (60, 64)),
            text(310, 17, "all rows died, and no read attempt is left", "", "middle"),
            arrow((305, 108), (305, 214)),
            text(314, 165, "Abort, while it may still be written"),
            arrow((262, 108), (262, 140), (84, 140), (84, 108)),
            text(173, 156, "its writer can write no more", "", "middle"),
            arrow((230, 236), (36, 236), (36, 108)),
            text(134, 228, "the writer is done, or dead", "", "middle"),
            arrow((610, 76), (640, 76), (640, 98), (612, 98)),
            text(600, 130, "read attempts, each", "", "middle"),
            text(600, 146, "of which ends once", "", "middle"),
        ],
    )


#: What dies; what follows as (word, width, kind); what becomes of its rows.
DEATHS: tuple[tuple[str, tuple[tuple[str, int, str], ...], str], ...] = (
    (
        "rollout worker",
        (("its group is incomplete", 166, "away"), ("evicted; rolled out again", 166, "good")),
        "nothing that was committed",
    ),
    (
        "consumer with claims",
        (("its claims stay", 166, "away"), ("released: others claim", 166, "good")),
        "nothing",
    ),
    (
        "trainer after its journal",
        (("its groups stay", 166, "away"), ("popped by the controller", 166, "good")),
        "nothing, and no step is made twice",
    ),
    ("a port of a slot host", (("other ports", 332, "good"),), "nothing"),
    (
        "slot host, started again",
        (("calls wait", 166, "away"), ("the same rows", 166, "good")),
        "nothing acknowledged",
    ),
    (
        "slot host, for good",
        (("calls wait", 166, "away"), ("its rows are lost_keys", 166, "bad")),
        "its rows, by name",
    ),
    ("TransferQueue unit", (("its rows are lost_keys", 332, "bad"),), "its rows, by name"),
    (
        "directory, with its log",
        (("calls wait", 166, "away"), ("rows, claims, tags", 166, "good")),
        "nothing acknowledged",
    ),
    ("TransferQueue controller", (("all calls: DataPlaneUnavailable", 332, "bad"),), "all rows"),
)


def deaths() -> str:
    """Draw what died and what comes back."""
    parts = [text(210, 20, "it dies", "", "middle"), text(552, 20, "lost is"), '<path d="M210 26V356" class="life"/>']
    for i, (who, spans, rest) in enumerate(DEATHS):
        y, x = 34 + 36 * i, 210.0
        parts += [text(150, y + 18, who, "", "end"), rect(158, y, 52, 26, "good")]
        for said, width, kind in spans:
            parts += [rect(x, y, width, 26, kind), text(x + width / 2, y + 18, said, "", "middle")]
            x += width
        parts.append(text(552, y + 18, rest))
    parts = ['<g transform="translate(16 0)">', *parts, "</g>"]
    return figure(780, 366, "What died, and what comes back; time goes to the right", parts)


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
    columns = [i for name in dict.fromkeys(wanted) for i, title in enumerate(head) if title == name]
    values = [[float(row[i].split()[0]) for i in columns] for row in body]  # a range may follow
    most = max(map(max, values))
    parts, y = [], 10.0
    for row, found in zip(body, values, strict=True):
        for number, i in enumerate(columns):
            label = row[0] if len(columns) == 1 else f"{row[0]}, {head[i - 1]}"
            value = max(0.0, found[number])
            parts += [
                text(230, y + 14, label, "", "end"),
                rect(238, y, round(value / most * 380), 18, f"bar{number}"),
            ]
            parts.append(text(244 + value / most * 380, y + 14, row[i]))
            y += 24
    return figure(690, int(y) + 4, f"{wanted[0]}, from the table in {page}", parts)
