"""Hooks of the site's build: generated pages and parts, links to files outside docs/, links to the glossary."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

import drawings
import glossary
import tables
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: Texts of the repository that are pages of the site: their path there, and here.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "tests/README.md": "project/tests.md",
    "asyncdp/testing/PROMISES.md": "project/promises.md",
}
#: Fenced code, in which nothing is a link, or the target of a link to a file.
LINK = re.compile(r"^```.*?^```|(?<=\]\()(?![a-z]+:|#)([^)#\s]+)", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"^<!-- (table|drawing): (.+?) -->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".lua": "lua", ".yml": "yaml"}


def page_of(path: str) -> str:
    """Return where the site has a file or folder of the repository: a text as a page, code as a page that shows it."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"source/{path.rstrip('/')}.md")


def relinked(text: str, origin: str, page: str) -> tuple[str, set[str]]:
    """Return a text with its links to files as the site has them, and the files outside docs/ that it links to.

    Args:
        text: Markdown.
        origin: Path of its file in the repository, to which its links are relative.
        page: Path of its page in the site.
    """
    linked = set()

    def target(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[1]))
        if not path.startswith("docs/"):
            linked.add(path)
        return posixpath.relpath(page_of(path), posixpath.dirname(page) or ".")

    return LINK.sub(target, text), linked


def source(path: str) -> str:
    """Return the page of a file of the repository that is no text: its code, or what a folder holds."""
    file = ROOT / path
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if file.is_dir():
        names = sorted(one.name + "/" * one.is_dir() for one in file.iterdir() if one.name[0] not in "_.")
        return head + "".join(f"- `{name}`\n" for name in names)
    return f"{head}```{LANGUAGES.get(file.suffix, '')}\n{file.read_text()}```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/: the texts of the project, and what any page links to."""
    linked: set[str] = set()
    for page in files.documentation_pages():
        linked |= relinked(page.content_string, f"docs/{page.src_uri}", page.src_uri)[1]
    for origin, page in PAGES.items():
        text, more = relinked((ROOT / origin).read_text(), origin, page)
        linked |= more
        head = "---\nsearch: {boost: 0.5}\n---\n\n" if page.startswith("project/") else ""
        files.append(File.generated(config, page, content=head + text))
    for path in sorted(linked - PAGES.keys()):
        files.append(File.generated(config, page_of(path), content=source(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace the markers of tables and drawings, and the links to files outside docs/."""
    uri = page.file.src_uri
    if page.file.generated_by is None:
        markdown = relinked(markdown, f"docs/{uri}", uri)[0]
    makers = {"table": tables.table, "drawing": drawings.drawing}
    return MARKER.sub(lambda found: makers[found[1]](found[2]), markdown)


def on_page_content(html: str, page: Page, files: Files, **_: object) -> str:
    """Link the first use of each term of the glossary."""
    uri = page.file.src_uri
    if uri == "glossary.md" or uri.startswith(("source/", "project/")):
        return html
    return glossary.linked(html, files.src_uris["glossary.md"].url_relative_to(page.file))
