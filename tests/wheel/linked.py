"""Makes a venv that holds exactly what an extra of asyncdp names: links to what is installed where this script runs.

Run by the interpreter whose packages are to be linked; needs nothing but its standard library and pip. So nothing is
downloaded, no gigabytes are written, and what an extra forgot to name is missing in its venv.
"""

from __future__ import annotations

import json
import shutil
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from pip._vendor.packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution


def closure(named: Iterable[str]) -> tuple[dict[str, Distribution], list[str]]:
    """Return the installed distributions that requirements need, and the names of those that are not installed."""
    found: dict[str, Distribution] = {}
    missing, seen = [], set()
    todo = [(Requirement(text), "") for text in named]
    while todo:
        wanted, extra = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for taken in ("", *sorted(wanted.extras)):
            if (wanted.name, taken) in seen:
                continue
            seen.add((wanted.name, taken))
            try:
                dist = found.setdefault(wanted.name.lower(), distribution(wanted.name))
            except PackageNotFoundError:
                missing.append(wanted.name)
                break
            todo += [(Requirement(text), taken) for text in dist.requires or ()]
    return found, missing


def files_of(dist: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield the top-level entries of a distribution below site-packages, and where they are."""
    for top in sorted({file.parts[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__", "/")}):
        yield top, Path(str(dist.locate_file(top)))


def link(into: Path, where: Path) -> None:
    """Link a file or folder; a folder that several distributions share is made of links."""
    if not into.exists():
        into.symlink_to(where)
    elif where.is_dir() and into.resolve() != where.resolve():
        if into.is_symlink():
            before = into.resolve()
            into.unlink()
            into.mkdir()
            for one in before.iterdir():
                link(into / one.name, one)
        for one in where.iterdir():
            link(into / one.name, one)


def main(folder: Path, requirements: list[str]) -> None:
    """Make the venv; print what is in it, and what should be and is not installed here."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    found, missing = closure(requirements)
    for dist in found.values():
        for top, where in files_of(dist):
            link(packages / top, where)
    print(json.dumps({"packages": str(packages), "linked": sorted(found), "missing": sorted(missing)}))  # noqa: T201 - its answer


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
