"""The leak guard and the watchdog, each proved by a test that leaks, or stands still."""

import textwrap
from pathlib import Path

import pytest

from tests.testing.project import Project, Run

LEAKS = """
    import asyncio, multiprocessing, os, subprocess, sys, threading, time
    from multiprocessing import shared_memory
    import anyio, pytest

    kept = []
    stop = threading.Event()

    @pytest.fixture(scope="module", autouse=True)
    def what_a_wider_fixture_makes_is_no_leak():
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        thread = threading.Thread(target=stop.wait, name="of the module")
        thread.start()
        segment = shared_memory.SharedMemory(create=True, size=64)
        yield
        stop.set()
        thread.join()
        process.communicate(b"\\n")
        segment.close()
        segment.unlink()
        for one in kept:
            if isinstance(one, subprocess.Popen):
                one.kill()
                one.wait()

    def test_first_of_all():
        pass

    def test_clean():
        thread = threading.Thread(target=time.sleep, args=(0.2,))
        thread.start()
        subprocess.run([sys.executable, "-c", ""])
        with open(os.devnull):
            pass
        segment = shared_memory.SharedMemory(create=True, size=64)
        segment.close()
        segment.unlink()

    def test_thread():
        thread = threading.Thread(target=stop.wait, name="forgotten")
        thread.start()

    def test_process():
        kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

    def test_file():
        kept.append(os.open(__file__, os.O_RDONLY))

    def test_segment():
        kept.append(shared_memory.SharedMemory(create=True, size=64, name=f"asyncdp-leak-{os.getpid()}"))

    @pytest.mark.anyio
    async def test_task(anyio_backend):
        if anyio_backend == "trio":
            import trio
            trio.lowlevel.spawn_system_task(trio.sleep_forever, name="forgotten")
        else:
            kept.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))

    @pytest.mark.anyio
    async def test_clean_tasks(anyio_backend):
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 0.01)

    @pytest.mark.asyncio
    async def test_task_of_pytest_asyncio():
        kept.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))

    @pytest.mark.virtual_time
    async def test_task_in_virtual_time():
        kept.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))

    @pytest.mark.leaks(allow="threads", reason="the thread is the subject")
    def test_allowed():
        threading.Thread(target=stop.wait, name="allowed").start()

    def test_lasting():
        from asyncdp.testing.pytest.leaks import lasting
        with lasting():
            threading.Thread(target=stop.wait, name="lasting").start()
"""


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a project that leaks."""
    project = Project(tmp_path_factory.mktemp("leaking"))
    project.write(pytest_ini="[pytest]\nasyncdp_leaks = true\n", test_a=LEAKS)
    return project.apart("-o", "asyncio_default_fixture_loop_scope=function", "-v", "-rfE")


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("test_thread", "thread 'forgotten'"),
        ("test_process", "process "),
        ("test_file", "file descriptor "),
        ("test_segment", "shared-memory segment asyncdp-leak-"),
        ("test_task[asyncio]", "task 'forgotten' (sleep)"),
        ("test_task[trio]", "task 'forgotten' (sleep_forever)"),
        ("test_task_of_pytest_asyncio", "task 'forgotten' (sleep)"),
        ("test_task_in_virtual_time", "task 'forgotten' (sleep)"),
    ],
)
def test_what_a_test_leaves_behind_is_named(leaking: Run, test: str, said: str) -> None:
    """A thread, process, file, segment or task that outlives its test fails it, by name."""
    lines = [line for line in leaking.text.splitlines() if f"::{test} - " in line and line.startswith(("FAIL", "ERR"))]
    assert len(lines) == 1, leaking.text
    told = [line for line in leaking.text.splitlines() if f"{test} has left behind: " in line and said in line]
    assert told, leaking.text


def test_what_is_no_leak_is_left_alone(leaking: Run) -> None:
    """What wider fixtures made, what ends in time, what is allowed or lasting: no failure."""
    assert leaking.counts == {"failed": 4, "passed": 10, "error": 4}, leaking.text
    for test in ("test_first_of_all", "test_clean", "test_clean_tasks[trio]", "test_allowed", "test_lasting"):
        assert f"test_a.py::{test} PASSED" in leaking.text


@pytest.mark.parametrize(
    "shared", [pytest.param((), id="one process"), pytest.param(("-n", "1"), id="xdist", marks=pytest.mark.slow)]
)
def test_a_segment_that_nobody_has_open_is_told_at_the_end(tmp_path: Path, shared: tuple[str, ...]) -> None:
    """It may be another program's, so it counts only if it is still there when the session ends."""
    project = Project(tmp_path).write(
        test_a="""
            import os, pathlib, pytest

            @pytest.mark.leaks
            def test_a():
                pathlib.Path(f"/dev/shm/asyncdp-leak-{os.getpid()}").touch()

            @pytest.mark.leaks
            def test_b():
                pathlib.Path(f"/dev/shm/asyncdp-brief-{os.getpid()}").touch()

            def test_c():
                pathlib.Path(f"/dev/shm/asyncdp-brief-{os.getpid()}").unlink()
        """
    )
    run = project.apart(*shared)
    left = list(Path("/dev/shm").glob("asyncdp-leak-*"))
    try:
        assert run.code == 1, run.text
        assert "LEFT BEHIND: shared-memory segment asyncdp-leak-" in run.text
        assert "since test_a.py::test_a" in run.text
        assert "asyncdp-brief" not in run.text
    finally:
        for path in left:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "mark",
    [
        "leaks(allow='theads', reason='x')",
        pytest.param("leaks(allow='threads')", marks=pytest.mark.slow),
        pytest.param("leaks('threads')", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_marker_is_named(tmp_path: Path, mark: str) -> None:
    """An unknown kind, or an exception without a reason, is an error."""
    project = Project(tmp_path).write(test_a=f"import pytest\n@pytest.mark.{mark}\ndef test_a(): pass\n")
    run = project.apart()
    assert run.code != 0
    assert "test_a.py::test_a: leaks" in run.text, run.text


def test_without_the_setting_nobody_looks(tmp_path: Path) -> None:
    """The guard is off unless asked for."""
    code = "import threading\ndef test_a(): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    assert Project(tmp_path).write(test_a=code).apart().counts == {"passed": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["anyio", "asyncio", "virtual_time"])
def test_a_loop_that_stands_still_shows_all_stacks(tmp_path: Path, kind: str) -> None:
    """Blocked by a call that does not give way: threads and tasks are shown, where each is; the test goes on."""
    code = """
        import time, anyio, pytest

        async def waiting_for_godot():
            await anyio.sleep(300)

        def blocks_the_loop():
            time.sleep(0.8)

        @pytest.mark.KIND
        async def test_blocked():
            async with anyio.create_task_group() as group:
                group.start_soon(waiting_for_godot)
                await anyio.sleep(0.01)
                blocks_the_loop()
                blocks_the_loop()
                group.cancel_scope.cancel()

        @pytest.mark.KIND
        async def test_busy_but_turning():
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                await anyio.sleep(0)
    """
    project = Project(tmp_path).write(
        pytest_ini="[pytest]\nasyncdp_watchdog_s = 0.3\nasyncio_default_fixture_loop_scope = function\n",
        test_a=textwrap.dedent(code).replace("KIND", kind),
    )
    run = project.apart()
    loops = 2 if kind == "anyio" else 1
    assert run.counts == {"passed": 2 * loops}, run.text
    assert run.text.count("stands still: its event loop has not turned for") == loops, run.text
    assert run.text.count("in blocks_the_loop") >= loops
    assert run.text.count("in waiting_for_godot") == loops
    assert "test_a.py::test_blocked" in run.text
    assert "test_busy_but_turning stands still" not in run.text


def test_a_test_that_waits_for_ever_shows_its_tasks(tmp_path: Path) -> None:
    """The loop turns, and nothing comes: after some time the tasks are shown all the same."""
    project = Project(tmp_path).write(
        pytest_ini="[pytest]\nasyncdp_watchdog_s = 0.1\n",
        test_a="""
            import anyio, pytest

            async def waiting_for_godot():
                await anyio.sleep(2)

            @pytest.mark.anyio
            async def test_a():
                await waiting_for_godot()
        """,
    )
    run = project.apart("-p", "no:asyncio")
    assert run.text.count("its loop turns") == 2, run.text
    assert "in waiting_for_godot" in run.text
