"""Links the first use of each term of the glossary on a page to its entry."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

#: A term is a heading of the third level; forms that also mean it stand in a comment below.
ENTRY = re.compile(r"^### (.+?)(?: \{ ?#([\w-]+) ?\})?\n(?:<!-- also: (.+?) -->\n)?", re.MULTILINE)
#: Text in these is not linked: it is a link, code, a heading or a drawing already.
CLOSED = frozenset(
    {
        "a",
        "button",
        "code",
        "figure",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "label",
        "pre",
        "script",
        "style",
        "svg",
        "th",
    }
)


#: Phrases in which a term means something else.
OTHERS = ("task group", "task groups", "round trip", "round trips")


@cache
def terms() -> dict[str, str]:
    """Return the anchor of each form of each term."""
    text = (Path(__file__).parents[1] / "glossary.md").read_text()
    found = dict.fromkeys(OTHERS, "")
    for term, anchor, forms in ENTRY.findall(text):
        slug = anchor or re.sub(r"[^\w]+", "-", term.lower())
        found |= dict.fromkeys([term.lower(), *filter(None, forms.lower().split(", "))], slug)
    return found


def linked(html: str, glossary: str) -> str:
    """Return the HTML with links to the page ``glossary``."""
    parser = _Linker(glossary)
    parser.feed(html)
    parser.close()
    return "".join(parser.out)


class _Linker(HTMLParser):
    """Copies HTML, with links where a term stands in plain text for the first time."""

    def __init__(self, glossary: str) -> None:
        super().__init__(convert_charrefs=False)
        self.out: list[str] = []
        self._glossary, self._depth, self._seen = glossary, 0, set[str]()
        self._forms = re.compile(
            rf"\b(?:{'|'.join(sorted(map(re.escape, terms()), key=len, reverse=True))})\b", re.IGNORECASE
        )

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - as the base class has it
        self._depth += tag in CLOSED
        self.out.append(self.get_starttag_text() or "")

    def handle_startendtag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - as above
        self.out.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag in CLOSED
        self.out.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.out.append(data if self._depth else self._forms.sub(self._link, data))

    def handle_entityref(self, name: str) -> None:
        self.out.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.out.append(f"&#{name};")

    def handle_comment(self, data: str) -> None:
        self.out.append(f"<!--{data}-->")

    def _link(self, found: re.Match[str]) -> str:
        anchor = terms()[found[0].lower()]
        if not anchor or anchor in self._seen:
            return found[0]
        self._seen.add(anchor)
        return f'<a class="term" href="{self._glossary}#{anchor}">{found[0]}</a>'
