"""The pytest plugin, as a user's project meets it."""

import subprocess
import sys
from pathlib import Path

import pytest
import trio.testing  # noqa: F401 - as below

import asyncdp.testing.pytest.markers  # noqa: F401 - kept loaded over runs in this process: torch cannot be loaded twice
from tests.testing.project import Project

pytest_plugins = ["pytester"]

MODULES = (".guards", ".leaks", ".loop_fixtures", ".plugin", ".virtual_item", ".watchdog")
PUT_AND_GET = """
    import torch

    async def put_and_get(plane):
        await plane.register_partition("p", ["x"], 4, ["t"])
        await plane.put_samples(["a"], "p", {"x": torch.ones(1)})
        return (await plane.get_samples(["a"], "p", ["x"]))["x"].tolist()
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    """An empty project."""
    return Project(pytester.path)


def test_it_is_there_and_imports_nothing(tmp_path: Path) -> None:
    """Pytest finds the plugin by its entry point; in a run that uses none of it, torch and the core stay out."""
    code = (
        "import sys, pytest\n"
        "class Look:\n"
        "    def pytest_configure(self, config):\n"
        "        assert config.pluginmanager.has_plugin('asyncdp')\n"
        "    def pytest_unconfigure(self, config):\n"
        "        loaded = {m for m in sys.modules if m.split('.')[0] in ('torch', 'tensordict', 'asyncdp')}\n"
        "        print('LOADED', sorted(loaded))\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]], plugins=[Look()]))"
    )
    empty = "def test_nothing(): pass\n"
    path = tmp_path / "test_nothing.py"
    path.write_text(empty)
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = next(line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    names = ["asyncdp", "asyncdp.testing", *(f"asyncdp.testing.pytest{m}" for m in ("", *MODULES))]
    assert loaded == f"LOADED {names}"


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_with_pytest_asyncio(project: Project, pytester: pytest.Pytester, mode: str) -> None:
    """In both modes: a client on the loop of the test, the user's async fixtures end before it, marks stay strict."""
    project.write(
        pytest_ini=f"[pytest]\nasyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\n",
        common=PUT_AND_GET,
        test_a="""
            import asyncio
            import pytest, pytest_asyncio
            from common import put_and_get
            from asyncdp.testing import FaultPlan

            pytestmark = pytest.mark.asyncio

            @pytest_asyncio.fixture
            async def controller(data_plane):
                await data_plane.ping()
                yield data_plane
                await data_plane.ping()  # still open, on the same loop

            async def test_plain(data_plane):
                assert await put_and_get(data_plane) == [1.0]

            async def test_fixture_of_my_own(controller):
                assert await put_and_get(controller) == [1.0]

            @pytest.mark.faults(FaultPlan(seed=7).on("get_samples").refuse(times=1))
            async def test_faults(data_plane, fault_plan):
                assert await put_and_get(data_plane) == [1.0]
                assert fault_plan.counts == {"refuse": 1}
                assert fault_plan.seed == 7

            @pytest.mark.faults(FaultPlan(seed=7).on("get_samples").refuse(times=1))
            async def test_each_test_has_a_plan_of_its_own(data_plane, fault_plan):
                assert fault_plan.counts == {}

            @pytest.mark.asyncio(loop_scope="module")
            async def test_loop_of_the_module(data_plane):
                assert await put_and_get(data_plane) == [1.0]

            class TestMethods:
                async def test_method(self, data_plane):
                    assert await put_and_get(data_plane) == [1.0]

            @pytest.mark.virtual_time
            async def test_hours(data_plane):
                began = asyncio.get_running_loop().time()
                assert await put_and_get(data_plane) == [1.0]
                await asyncio.sleep(3000)
                assert asyncio.get_running_loop().time() - began >= 3000
        """,
    )
    run = project.here(pytester, "-W", "error")
    assert run.counts == {"passed": 7}, run.text


def test_with_anyio(project: Project, pytester: pytest.Pytester) -> None:
    """On both loops, with async fixtures of anyio's plugin; in virtual time too."""
    project.write(
        common=PUT_AND_GET,
        test_a="""
            import anyio, pytest
            from common import put_and_get

            pytestmark = pytest.mark.anyio

            @pytest.fixture
            async def controller(data_plane):
                await data_plane.ping()
                yield data_plane
                await data_plane.ping()

            async def test_plain(data_plane):
                assert await put_and_get(data_plane) == [1.0]

            async def test_fixture_of_my_own(controller):
                assert await put_and_get(controller) == [1.0]

            @pytest.mark.faults({"kind": "silent", "verb": "get_samples", "times": 1})
            @pytest.mark.virtual_time(seed=3)
            async def test_hours(data_plane, fault_plan, anyio_backend_name):
                from sniffio import current_async_library
                assert current_async_library() == anyio_backend_name
                began = anyio.current_time()
                assert await put_and_get(data_plane) == [1.0]
                assert anyio.current_time() - began >= 10  # an attempt's time
                assert fault_plan.counts == {"silent": 1}
        """,
    )
    run = project.here(pytester, "-W", "error", without=["asyncio"])
    assert run.counts == {"passed": 6}, run.text


def test_without_any_async_plugin(project: Project, pytester: pytest.Pytester) -> None:
    """A sync test runs a loop itself; an async one needs nothing but the marker virtual_time."""
    project.write(
        common=PUT_AND_GET,
        test_a="""
            import asyncio, pytest
            from common import put_and_get
            from asyncdp.testing import run_virtual

            def test_sync(data_plane):
                assert asyncio.run(put_and_get(data_plane)) == [1.0]

            @pytest.mark.parametrize("backend", ["asyncio", "trio"])
            def test_virtual_by_hand(data_plane, backend):
                assert run_virtual(lambda: put_and_get(data_plane), backend) == [1.0]

            @pytest.mark.virtual_time(seed=range(3), backend=["asyncio", "trio"])
            async def test_async(data_plane):
                assert await put_and_get(data_plane) == [1.0]

            class TestMethods:
                @pytest.mark.virtual_time(backend="trio")
                async def test_method(self, data_plane):
                    assert await put_and_get(data_plane) == [1.0]
        """,
    )
    run = project.here(pytester, "-W", "error", "-v", without=["asyncio", "anyio"])
    assert run.counts == {"passed": 10}, run.text
    assert "test_async[asyncio-seed0] PASSED" in run.text
    assert "test_async[trio-seed2] PASSED" in run.text


def test_the_seed_decides_the_order(project: Project, pytester: pytest.Pytester) -> None:
    """The same seed gives the same order of ready tasks, another seed another one."""
    project.write(
        test_a="""
            import asyncio, pytest
            ORDERS = {}

            @pytest.mark.parametrize("again", [0, 1])
            @pytest.mark.virtual_time(seed=range(6), backend="asyncio")
            async def test_order(again, request):
                order = []
                async def task(n):
                    await asyncio.sleep(0)
                    order.append(n)
                await asyncio.gather(*map(task, range(6)))
                seed = request.node.callspec.params["_virtual_run"].seed
                assert ORDERS.setdefault(seed, order) == order

            def test_orders_differ():
                assert len({tuple(order) for order in ORDERS.values()}) > 1
        """
    )
    run = project.here(pytester, without=["asyncio"])
    assert run.counts == {"passed": 13}, run.text


def test_a_failure_shows_its_seed_and_its_faults(project: Project, pytester: pytest.Pytester) -> None:
    """A failed test says how to repeat it, and which faults it met."""
    project.write(
        common=PUT_AND_GET,
        test_a="""
            import pytest
            from common import put_and_get
            from asyncdp.testing import FaultPlan

            @pytest.mark.faults(FaultPlan(seed=9).on("get_samples").refuse())
            @pytest.mark.virtual_time(seed=5)
            async def test_fails(data_plane):
                await put_and_get(data_plane)
        """,
    )
    run = project.here(pytester)
    assert run.counts == {"failed": 1}
    assert "FaultPlan(seed=9, rules=[{'kind': 'refuse', 'verb': 'get_samples'}])" in run.text
    assert "Injected('refuse', verb='get_samples', call='Locate'" in run.text
    assert "@pytest.mark.virtual_time(seed=5, backend='asyncio')" in run.text


def test_a_hang_says_so_and_how_to_repeat_it(project: Project, pytester: pytest.Pytester) -> None:
    """What is told repeats the run as it was: without a seed nothing is shuffled, a limit of one's own stays."""
    project.write(
        test_a="""
            import asyncio, pytest

            @pytest.mark.virtual_time(limit_s=60)
            async def test_hangs():
                await asyncio.Event().wait()
        """,
    )
    run = project.here(pytester, without=["asyncio"])
    assert run.counts == {"failed": 1}
    assert "TimeoutError: not done after 60 s of virtual time" in run.text
    assert "@pytest.mark.virtual_time(backend='asyncio', limit_s=60)" in run.text


#: (marker, code, what is said of it)
NONSENSE = [
    ("virtual_time(sed=3)", "async def test_a(): pass", "virtual_time takes backend, limit_s, seed, shuffle"),
    ("virtual_time(backend='curio')", "async def test_a(): pass", "knows ('asyncio', 'trio'), not 'curio'"),
    ("virtual_time(seed='x')", "async def test_a(): pass", "takes whole numbers, not 'x'"),
    ("virtual_time(seed=[])", "async def test_a(): pass", "virtual_time(seed=...) got an empty list"),
    ("virtual_time(shuffle=3)", "async def test_a(): pass", "takes True or False, not 3"),
    ("virtual_time(limit_s='1h')", "async def test_a(): pass", "takes positive seconds, not '1h'"),
    ("virtual_time", "def test_a(): pass", "virtual_time and is no async function"),
    ("faults(3)", "async def test_a(data_plane): pass", "takes one FaultPlan, its JSON, or rules, not 3"),
    ("faults", "async def test_a(data_plane): pass", "it was given none"),
    ("faults('refuse')", "async def test_a(data_plane): pass", "a fault plan as text is JSON, not 'refuse'"),
    ("faults(FaultPlan().refuse())", "def test_a(): pass", "faults and asks for none of data_plane, tq_plane"),
    ("leaks(allow=['threads'])", "def test_a(): pass", "leaks(allow=...) needs a reason="),
    ("faults({'kind': 'explode'})", "async def test_a(data_plane): pass", "kind: 'explode' is not one of"),
    ("faults(sed=1)", "async def test_a(data_plane): pass", "sed: the marker faults takes"),
    ("data_plane(attempt_timeout=1)", "async def test_a(data_plane): pass", "attempt_timeout: no layer has this"),
    ("data_plane(config={'hosts': 3})", "async def test_a(data_plane): pass", "hosts"),
    ("virtual_time", "async def test_a(tq_plane): pass", "real sockets do not go with virtual time"),
]


@pytest.mark.parametrize(
    ("mark", "body", "said"),
    [pytest.param(*case, marks=pytest.mark.slow if at % 2 else ()) for at, case in enumerate(NONSENSE)],
)
def test_what_makes_no_sense_is_named(
    project: Project, pytester: pytest.Pytester, mark: str, body: str, said: str
) -> None:
    """A wrong marker is an error that says what is wrong, not a test that passes."""
    fake = "@pytest.fixture(scope='session')\ndef _tq_servers(): return None\n" if "tq_plane" in body else ""
    project.write(test_a=f"import pytest\nfrom asyncdp.testing import FaultPlan\n{fake}@pytest.mark.{mark}\n{body}\n")
    run = project.here(pytester, without=["asyncio"] if "virtual" in mark else [])
    assert run.code not in (0, 5), run.text
    assert said in run.text, run.text
    assert "KeyError" not in run.text, "one wrong marker is one error"


def test_an_async_fixture_does_not_go_with_virtual_time(project: Project, pytester: pytest.Pytester) -> None:
    """It would have been set up on another loop: said by name."""
    project.write(
        pytest_ini="[pytest]\nasyncio_mode = auto\n",
        test_a="""
            import pytest

            @pytest.fixture
            async def controller():
                yield 1

            @pytest.mark.virtual_time
            async def test_a(controller): pass
        """,
    )
    run = project.here(pytester)
    assert "the fixture 'controller' is async: it was set up on another event loop" in run.text
    assert run.counts["failed"] == 1, run.text


def test_faults_are_given_as_plan_rules_or_json(project: Project, pytester: pytest.Pytester) -> None:
    """Each form is the same plan; seed= replaces its seed; without the marker the plan is empty and can be added to."""
    project.write(
        common=PUT_AND_GET,
        test_a="""
            import pytest
            from common import put_and_get
            from asyncdp.testing import FaultPlan, Rule, Where

            WANTED = FaultPlan(4).on("get_samples").refuse(times=1)
            SAME = {"kind": "refuse", "verb": "get_samples", "times": 1}
            JSON = WANTED.to_json()
            marks = [
                pytest.mark.faults(WANTED), pytest.mark.faults(JSON), pytest.mark.faults(SAME, seed=4),
                pytest.mark.faults(Rule("refuse", Where("get_samples"), times=1), seed=4),
                pytest.mark.faults(WANTED.fresh(), seed=4),
            ]

            @pytest.mark.parametrize("_", [pytest.param(i, marks=mark) for i, mark in enumerate(marks)])
            @pytest.mark.virtual_time
            async def test_forms(data_plane, fault_plan, _):
                assert (fault_plan.seed, fault_plan.rules) == (4, WANTED.rules)
                await put_and_get(data_plane)
                assert fault_plan.counts == {"refuse": 1}
                assert not fault_plan.idle

            @pytest.mark.virtual_time
            async def test_added(data_plane, fault_plan):
                assert fault_plan.rules == ()
                fault_plan.on("get_samples").refuse(times=1)
                await put_and_get(data_plane)
                assert fault_plan.counts == {"refuse": 1}
        """,
    )
    run = project.here(pytester, "-W", "error", without=["asyncio"])
    assert run.counts == {"passed": 6}, run.text


def test_the_plane_can_be_chosen(project: Project, pytester: pytest.Pytester) -> None:
    """The marker data_plane sets keys of the config and settings of layers; pairs are checked at the end."""
    project.write(
        common=PUT_AND_GET,
        test_a="""
            import anyio, pytest
            from common import put_and_get
            from asyncdp import DataPlaneError
            from asyncdp.calls import Ping

            @pytest.mark.data_plane(config={"num_storage_units": 1}, attempt_timeout_s=0.5, max_attempts=1)
            @pytest.mark.faults({"kind": "silent", "verb": "ping"})
            @pytest.mark.virtual_time
            async def test_settings(data_plane, fault_plan):
                began = anyio.current_time()
                with pytest.raises(DataPlaneError):
                    await data_plane.ping()
                assert anyio.current_time() - began == pytest.approx(0.5)
                with pytest.raises(ValueError, match="host-1"):
                    fault_plan.cut("host-1")

            @pytest.mark.virtual_time
            async def test_pair(data_plane_pair):
                client, backend = data_plane_pair()
                with anyio.move_on_after(1):
                    await client.ping()
                async with anyio.create_task_group() as group:
                    group.start_soon(client.ping)
                    await anyio.sleep(1)
                    await client.close()
        """,
    )
    run = project.here(pytester, without=["asyncio"])
    assert run.counts["passed"] == 1, run.text
    assert "Ping() of ping (not taken)" in run.text
