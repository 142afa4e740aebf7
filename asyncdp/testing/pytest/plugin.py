"""The pytest plugin: fixtures, markers and options. It has no effect on runs that use none of them.

pytest loads this module in every run, so it imports neither torch nor the core of asyncdp: the modules that a fixture
or marker needs are imported when a test uses it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from . import guards, loop_fixtures, virtual_item

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..faults.plan import FaultPlan
    from ..scripted.pair import Pair
    from .real_planes import RealPlane

__all__: list[str] = []

MARKERS = (
    "faults(plan, *, seed=0): faults for data_plane, tq_plane, ucxx_plane: a FaultPlan, its JSON, or rules",
    "data_plane(*, config=None, **settings): keys of the plane's config, and settings of the layers, for its fixtures",
    "virtual_time(*, seed=None, backend=None, shuffle=None, limit_s=3600): run an async test once per seed and backend",
    "leaks(*, allow=(), reason=None): fail the test if it leaves tasks, threads, processes, files or segments behind",
)
#: The fixtures whose planes get the faults of the marker ``faults``.
PLANES = ("data_plane", "tq_plane", "ucxx_plane")
_PLAN = pytest.StashKey["FaultPlan"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the ini options."""
    guards.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the hooks of leak guard and watchdog."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(guards.Guards(config), "asyncdp-guards")


# --- virtual time, and fixtures on the loop of their test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test by the seeds and backends of its marker ``virtual_time``."""
    virtual_item.parametrize(metafunc)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a test with the marker ``virtual_time`` in virtual time, even if another async plugin would run it."""
    with virtual_item.replaced(pyfuncitem):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Set up the fixtures of clients such that each client is closed on the event loop that used it."""
    with loop_fixtures.replaced(fixturedef, request):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test with a ``faults`` marker of its own that uses no plane; its class or module may have one."""
    result = yield
    wanted = getattr(item, "fixturenames", ())
    if not {"fault_plan", "request", *PLANES}.intersection(wanted):
        for marker in item.own_markers:
            if marker.name == "faults" and any(type(arg).__module__.startswith("asyncdp.") for arg in marker.args):
                names = ", ".join(PLANES)
                pytest.fail(f"{item.name} has the marker faults and asks for none of {names}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the fault plan and the virtual-time seed of a failed test to its report."""
    report = yield
    if report.failed and call.when == "call":
        plan = item.stash.get(_PLAN, None)
        if plan is not None and plan.rules:
            report.sections.append(("fault plan", plan.report()))
        if (run := virtual_item.run_of(item)) is not None:
            report.sections.append(("virtual time", str(run)))
    return report


@pytest.fixture
def _virtual_run(request: pytest.FixtureRequest) -> Any:
    """Return the seed and backend of a parametrized virtual-time test; None for other tests."""
    return getattr(request, "param", None)


# --- fixtures


@pytest.fixture
def fault_plan(request: pytest.FixtureRequest) -> FaultPlan:
    """Return the fault plan of this test's plane from the marker ``faults``; without the marker, an empty plan."""
    from .markers import marked_plan

    plan = marked_plan(request.node)
    request.node.stash[_PLAN] = plan
    return plan


@pytest.fixture
@loop_fixtures.closing
def data_plane(request: pytest.FixtureRequest, fault_plan: FaultPlan) -> loop_fixtures.Held:
    """Return a client of a fresh plane in memory, with the default layers and the faults of the marker ``faults``."""
    from .markers import memory_client

    return memory_client(request.node, fault_plan)


@pytest.fixture(scope="session")
def _tq_servers() -> Iterator[RealPlane]:
    """Run a TransferQueue on Ray for the session."""
    from .real_planes import TransferQueuePlane

    with TransferQueuePlane() as plane:
        yield plane


@pytest.fixture
@loop_fixtures.closing
def tq_plane(request: pytest.FixtureRequest, _tq_servers: RealPlane, fault_plan: FaultPlan) -> loop_fixtures.Held:
    """Return a client of a fresh plane on a real TransferQueue, which runs on Ray for the whole session."""
    from .markers import real_client

    return real_client(request.node, _tq_servers, fault_plan)


@pytest.fixture(scope="session")
def _ucxx_servers() -> Iterator[RealPlane]:
    """Run a directory and slot hosts for the session."""
    from .real_planes import UcxxPlane

    with UcxxPlane() as plane:
        yield plane


@pytest.fixture
@loop_fixtures.closing
def ucxx_plane(request: pytest.FixtureRequest, _ucxx_servers: RealPlane, fault_plan: FaultPlan) -> loop_fixtures.Held:
    """Return a client of a plane of slot hosts and a Valkey directory.

    The servers run for the whole session and listen on loopback only; slots are accessed through shared memory. The
    plane is emptied after each test.
    """
    from .markers import real_client

    return real_client(request.node, _ucxx_servers, fault_plan)


@pytest.fixture
def data_plane_pair() -> Iterator[Callable[..., Pair]]:
    """Return :func:`asyncdp.testing.pair`; the test fails if it leaves a request of one of its pairs unanswered."""
    from ..scripted.pair import pair

    made: list[Pair] = []

    def keep(*args: Any, **kwargs: Any) -> Pair:
        made.append(pair(*args, **kwargs))
        return made[-1]

    yield keep
    for one in made:
        one.backend.finish()
