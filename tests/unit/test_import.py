import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter with nothing in its environment but `env`."""
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_import_needs_nothing_else() -> None:
    """A bare `import asyncdp` works in a fresh interpreter and tells its version."""
    done = run("-c", "import asyncdp; print(asyncdp.__version__)", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()[0].isdigit()


@pytest.mark.parametrize("name", ["middleware", "transports"])
def test_bare_name_is_refused(name: str) -> None:
    """From the checkout's root, the folder's bare name is refused and the right name is told; the right one imports."""
    refused = run("-c", f"import {name}", cwd=ROOT)
    assert refused.returncode == 1
    assert f"ImportError: '{name}' is not an import name of its own: import asyncdp.{name} instead" in refused.stderr
    assert run("-c", f"import asyncdp.{name}", cwd=ROOT).returncode == 0


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel built from the checkout, and the one built from its sdist."""
    out = tmp_path_factory.mktemp("dist")
    for target in ("sdist", "wheel"):
        built = run("-m", "hatchling", "build", "-t", target, "-d", str(out), cwd=ROOT)
        assert built.returncode == 0, built.stderr
    (sdist,) = out.glob("*.tar.gz")
    shutil.unpack_archive(sdist, out / "unpacked", filter="data")
    (source,) = (out / "unpacked").iterdir()
    built = run("-m", "hatchling", "build", "-t", "wheel", "-d", str(out / "again"), cwd=source)
    assert built.returncode == 0, built.stderr
    return {"checkout": next(out.glob("*.whl")), "sdist": next((out / "again").glob("*.whl"))}


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["checkout", "sdist"])
def test_wheel_holds_one_package(wheels: dict[str, Path], origin: str) -> None:
    """Built from the checkout or from the sdist, the wheel holds all of asyncdp, nothing else, and no links."""
    with zipfile.ZipFile(wheels[origin]) as wheel:
        entries = wheel.infolist()
    assert {entry.filename.split("/")[0].split("-")[0] for entry in entries} == {"asyncdp"}
    assert [entry.filename for entry in entries if entry.external_attr >> 28 == 0o12] == []
    packed = {entry.filename for entry in entries if entry.filename.startswith("asyncdp/")}
    sources = {f"asyncdp/{path.relative_to(ROOT / 'asyncdp')}" for path in (ROOT / "asyncdp").rglob("*.py")}
    for folder in ("middleware", "transports", "examples"):
        sources |= {f"asyncdp/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert packed >= sources | {"asyncdp/py.typed"}


@pytest.mark.slow
def test_wheel_imports_away_from_the_checkout(wheels: dict[str, Path], tmp_path: Path) -> None:
    """What the wheel holds imports on its own, both links among it, and the bare names are not there at all."""
    with zipfile.ZipFile(wheels["checkout"]) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import importlib.util as u, sys, asyncdp.middleware, asyncdp.transports; "
        f"sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]; "
        "print(asyncdp.transports.__file__, u.find_spec('middleware'), u.find_spec('transports'))"
    )
    done = run("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "asyncdp" / "transports" / "__init__.py"), "None", "None"]
