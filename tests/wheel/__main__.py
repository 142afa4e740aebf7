"""Builds wheel and sdist, checks them, tries each extra in a venv of its own, and runs tests against the wheel.

``make test-wheel``. Each ``--python`` is an interpreter in whose environment the dependencies are installed: from there
they are linked (tests/wheel/linked.py), so that nothing is downloaded.
"""

# ruff: noqa: T201 - it prints its report
from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email.parser import BytesParser
from pathlib import Path

from tests.wheel.smoke import SMOKE

ROOT = Path(__file__).parents[2]
#: What runs against the wheel: these know nothing of the checkout.
TESTS = ("tests/sans_io", "tests/layers", "tests/metrics", "tests/cli", "tests/contract/test_memory.py")
#: Beside the tests themselves, what they read of the checkout.
BESIDE = ("benchmarks", "docs", "pyproject.toml")
LIMIT_S = 1200


class Broken(Exception):
    """What is wrong, in words."""


def main(argv: list[str] | None = None) -> int:
    """Do all of it; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="Interpreter with the dependencies; may be repeated.")
    parser.add_argument("--extra", action="append", choices=SMOKE, help="Only these; '' is asyncdp itself.")
    parser.add_argument("--no-tests", action="store_true", help="Leave out the tests against the wheel.")
    parser.add_argument("tests", nargs="*", default=TESTS, help="Tests that run against the wheel.")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="asyncdp-wheel-") as made:
        folder = Path(made)
        try:
            wheel = build(folder / "dist")
            for python in given.python or [sys.executable]:
                for extra in SMOKE if given.extra is None else given.extra:
                    smoke(python, wheel, extra, folder / "venv")
                if not given.no_tests:
                    run_tests(python, wheel, folder, given.tests)
        except Broken as err:
            print(f"BROKEN: {err}")
            return 1
    return 0


# -- building and checking


def build(into: Path) -> Path:
    """Build sdist and wheel, and the wheel from the sdist alone; check them, and return the wheel."""
    _run(sys.executable, "-m", "hatchling", "build", "-d", into, cwd=ROOT)
    (wheel,) = into.glob("*.whl")
    (sdist,) = into.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(into / "unpacked", filter="data")
    (unpacked,) = (into / "unpacked").iterdir()
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", into / "again", cwd=unpacked)
    (again,) = (into / "again").glob("*.whl")
    names = check_wheel(wheel)
    if names != check_wheel(again):
        raise Broken(f"a wheel built from the sdist has other files: {names ^ check_wheel(again)}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size >> 10} KiB; {sdist.name} builds the same")
    return wheel


def check_wheel(wheel: Path) -> set[str]:
    """Check the files and the metadata of a wheel; return the names of its files."""
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        linked = [one.filename for one in packed.infolist() if (one.external_attr >> 28) == 0xA]
        (told,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(packed.read(told))
    info = told.partition("/")[0]
    source = {str(file.relative_to(ROOT)) for file in (ROOT / "asyncdp").rglob("*") if file.is_file()}
    source |= {str(file.relative_to(ROOT)) for file in (ROOT / "asyncdp").glob("*/") if file.is_symlink()}
    lacks = {name for name in source if "__pycache__" not in name and not any(n.startswith(name) for n in names)}
    stray = {name for name in names if not name.startswith(("asyncdp/", f"{info}/"))}
    if lacks or stray or linked:
        raise Broken(f"{wheel.name}: lacks {sorted(lacks)}, holds {sorted(stray)}, links {linked}")
    import asyncdp

    if metadata["Version"] != asyncdp.__version__:
        raise Broken(f"version {metadata['Version']} of the wheel is not asyncdp.__version__, {asyncdp.__version__}")
    if metadata["Description-Content-Type"] != "text/markdown" or not str(metadata.get_payload()).startswith("# "):
        raise Broken("the README is not the description")
    tried = {"dev", "docs", *(part for extra in SMOKE for part in extra.split(","))}
    unknown = set(metadata.get_all("Provides-Extra") or ()) - tried
    if unknown:
        raise Broken(f"no smoke test for the extras {sorted(unknown)}")
    return names


# -- trying


def venv(python: str, wheel: Path, extra: str, folder: Path, *more: str) -> tuple[Path | None, list[str]]:
    """Make a venv with the wheel and what one extra names; return its interpreter, and what is not to be had."""
    with zipfile.ZipFile(wheel) as packed:
        (told,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(packed.read(told))
    named = list(more)
    wanted = [part for part in extra.split(",") if part]
    for text in metadata.get_all("Requires-Dist") or ():
        what, _, marker = text.partition(";")
        if not marker or any(f"'{one}'" in marker or f'"{one}"' in marker for one in wanted):
            named.append(what.strip())
    made = json.loads(_run(python, ROOT / "tests" / "wheel" / "linked.py", folder, *named))
    missing = [name for name in made["missing"] if not name.startswith("asyncdp")]
    if missing:
        return None, missing
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(made["packages"])
    return folder / "bin" / "python", []


def smoke(python: str, wheel: Path, extra: str, folder: Path) -> None:
    """Try what one extra is for."""
    began = time.monotonic()
    own, missing = venv(python, wheel, extra, folder)
    name = f"{_version(python)}, extra {extra or '-'}"
    if own is None:
        print(f"{name}: not tried, since it is not installed: {', '.join(missing)}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="asyncdp-smoke-") as empty:
        for code in SMOKE[extra]:
            _run(own, "-I", "-c", code, cwd=empty)
    print(f"{name}: works ({time.monotonic() - began:.0f} s)", flush=True)


def run_tests(python: str, wheel: Path, folder: Path, tests: list[str]) -> None:
    """Run tests in a folder that holds them, but not asyncdp."""
    own, missing = venv(python, wheel, "testing,cli,ucxx,embedded,prometheus,otel", folder / "venv", *RUNNER)
    if own is None:
        print(f"{_version(python)}: no tests, since it is not installed: {', '.join(missing)}", flush=True)
        return
    away = folder / "away"
    shutil.rmtree(away, ignore_errors=True)
    for name in ("tests", *BESIDE):
        where = ROOT / name
        if where.is_dir():
            shutil.copytree(where, away / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(where, away / name)
    at = _run(own, "-c", "import asyncdp; print(asyncdp.__file__)", cwd=away).strip()
    if not at.startswith(str(folder)):
        raise Broken(f"the tests would not run against the wheel, but {at}")
    done = _run(own, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests, cwd=away)
    print(f"{_version(python)}, tests against {at}: {done.strip().splitlines()[-1]}", flush=True)


#: What the tests need beside the extras.
RUNNER = ("pytest-asyncio", "pytest-timeout", "pytest-xdist", "pyyaml")


def _version(python: str) -> str:
    return f"Python {_run(python, '-c', 'import platform; print(platform.python_version())').strip()}"


def _run(*words: object, cwd: Path | str | None = None) -> str:
    """Run a command; return what it printed, or raise Broken with the end of it."""
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        shown = " ".join(map(str, words))[:300]
        raise Broken(f"code {done.returncode} of {shown}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
