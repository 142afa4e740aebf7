"""The site is built strictly, needs nothing from elsewhere, and things are found in it by its search alone."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("material", reason="needs the extra: pip install 'asyncdp[docs]'")
pytest.importorskip("mkdocstrings", reason="needs the extra: pip install 'asyncdp[docs]'")

from asyncdp.protocol import VERBS
from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow

Search = Callable[[str], list[str]]
#: What somebody types, and where the answer is, among the first five hits.
WANTED = {
    "status failed tag": "reference/tags.html",
    "expected_num_keys": "reference/tags.html",
    "claim_lease_s": "config.html",
    "outage_patience_s": "config.html",
    "ClaimLost pop": "tutorials/trainer.html",
    "StaleSlotError": "reference/errors.html",
    "release claims of a dead worker": "tutorials/dead_consumers.html",
    "docker shm-size": "ucxx.html",
    "evict lost groups command": "reference/cli.html",
    "mutation_dedup capability": "reference/metadata.html",
    "flipped bits checksum": "transfer_queue.html",
    "prometheus alert": "operations.html",
    "tell workers weight version": "tutorials/weight_version.html",
    "retry budget": "layers.html",
    "wrong secret": "ucxx.html",
    "partition full DataPlaneNotReady": "reference/errors.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def search(site: Path) -> Search:
    """Search as the theme does: by lunr without stemming, titles above text, each word also as the beginning of one."""
    pytest.importorskip("lunr", reason="needs the extra: pip install 'asyncdp[docs]'")
    from lunr.builder import Builder
    from lunr.stop_word_filter import stop_word_filter

    made = json.loads((site / "search" / "search_index.json").read_text())
    separator = re.compile(made["config"]["separator"])
    builder = Builder()
    builder.pipeline.add(stop_word_filter)
    builder.ref("location")
    for name, how in made["config"]["fields"].items():
        builder.field(name, boost=how["boost"])
    for one in made["docs"]:
        plain = {name: html.unescape(re.sub(r"<[^>]+>", " ", one[name])) for name in ("title", "text")}
        words = {name: separator.sub(" ", text) for name, text in plain.items()}
        builder.add({**words, "location": one["location"], "tags": ""}, {"boost": one.get("boost", 1)})
    index = builder.build()

    def pages(query: str) -> list[str]:
        words = " ".join(f"{word}*" for word in separator.sub(" ", query.lower()).split() if len(word) > 2)
        return list(dict.fromkeys(hit["ref"].partition("#")[0] for hit in index.search(words)))

    return pages


@pytest.mark.timeout(600)
def test_the_site_builds_strictly(site: Path) -> None:
    """All links and anchors lead somewhere; every page of the navigation is there."""
    nav = re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(nav) > 35
    assert [page for page in nav if not (site / page).with_suffix(".html").exists()] == []


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """No page loads a script, a style, a font or a picture from another server."""
    for page in site.rglob("*.html"):
        assert not re.search(r'(?:src|<link[^>]* href)="(?:https?:)?//', page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\((?:https?:)?//", style.read_text()), style


def test_the_reference_has_every_verb_and_error(site: Path) -> None:
    """With an anchor of its own."""
    client, errors = ((site / "reference" / f"{name}.html").read_text() for name in ("client", "errors"))
    assert [verb for verb in VERBS if f'id="asyncdp.protocol.DataPlaneClient.{verb}"' not in client] == []
    from asyncdp import errors as defined

    assert [name for name in defined.__all__ if f'id="asyncdp.errors.{name}"' not in errors] == []


def test_terms_lead_to_the_glossary(site: Path) -> None:
    """Each entry is linked by some page, and each link is to an entry."""
    entries = set(re.findall(r'<h3 id="([\w-]+)"', (site / "glossary.html").read_text()))
    linked: set[str] = set()
    for page in site.rglob("*.html"):
        linked |= set(re.findall(r'class="term" href="(?:\.\./)*glossary\.html#([\w-]+)"', page.read_text()))
    assert len(entries) > 40
    assert linked == entries


@pytest.mark.parametrize("words", WANTED)
def test_it_is_found_by_search_alone(words: str, search: Search) -> None:
    """Among the first five pages."""
    assert WANTED[words] in search(words)[:5]
