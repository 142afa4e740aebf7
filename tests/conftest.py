"""What all tests share: the two event loops, one thread per process, one hypothesis profile, a random order."""

import os
import signal
from collections import Counter
from pathlib import PurePath

# Read by the OpenMP runtime when torch is loaded, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job starts with SIGINT ignored, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests import order
from tests.order import (
    pytest_addoption,
    pytest_configure_node,
    pytest_ignore_collect,
    pytest_xdist_make_scheduler,
)
from tests.parts import pytest_runtest_logreport, pytest_terminal_summary
from tests.untouched import Untouched

__all__ = [
    "anyio_backend",
    "pytest_addoption",
    "pytest_configure_node",
    "pytest_ignore_collect",
    "pytest_pycollect_makeitem",
    "pytest_runtest_logreport",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]


#: Folders whose tests must leave nothing behind. The others start servers whose libraries keep threads, sockets and
#: processes as they like; they look themselves at what is theirs.
LEAVE_NOTHING = frozenset(
    {"contract", "docs", "layers", "recovery", "sans_io", "seam", "sweep", "testing", "unit", "user_style"}
)
#: The contract on real servers. In make test each of its tests has so many cases there; in memory it has all of them.
ON_SERVERS = frozenset({"test_mooncake.py", "test_transfer_queue.py", "test_ucxx.py"})
CASES_ON_SERVERS = 2
#: In these only what runs in memory.
MEMORY_ONLY = frozenset({"contract", "sweep"})


def pytest_report_header(config: pytest.Config) -> str:
    """Say which order this is."""
    return order.said(config)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Do not collect what ``-m "not slow"`` would deselect as a whole: that is half of all tests."""
    if collector.config.option.markexpr != "not slow":
        return None
    module = collector.obj if isinstance(collector, pytest.Module) else None
    return [] if _is_slow(module) or (isinstance(obj, type) and _is_slow(obj)) else None


def _is_slow(of: object) -> bool:
    marks = getattr(of, "pytestmark", ())
    return any(mark.name == "slow" for mark in (marks if isinstance(marks, (list, tuple)) else (marks,)))


class Arranged:
    """Two turns at the collected tests: before pytest brings together what shares a fixture of a module, and after."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave to make test-all the layers on trio, but for their cancels, and many cases on real servers; shuffle."""
        shown: Counter[tuple[object, ...]] = Counter()
        for item in items:
            params = getattr(getattr(item, "callspec", None), "params", {})
            on_trio = "trio" in (params.get("anyio_backend"), params.get("backend"))
            if on_trio and item.path.parent.name == "layers" and item.path.name != "test_cancel.py":
                item.add_marker("slow")
            if item.path.parent.name == "contract" and item.path.name in ON_SERVERS:
                test = (item.path, getattr(item, "originalname", item.name), params.get("open_plane"))
                shown[test] += 1
                if shown[test] > CASES_ON_SERVERS:
                    item.add_marker("slow")
        order.shuffle(config, items)


def pytest_configure(config: pytest.Config) -> None:
    """Have the tests shuffled, and what they leave changed told; set up what they use, in a process that runs some."""
    config.pluginmanager.register(Arranged(), "asyncdp-tests-order")
    config.pluginmanager.register(Untouched(), "asyncdp-tests-untouched")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it shares the tests out, and runs none
    import hypothesis
    import torch

    torch.set_num_threads(1)
    # No deadline: on a shared machine a slow example is no finding. In CI the same examples each time, so that a red
    # run is about the change under test.
    once = bool(os.environ.get("CI"))
    slow = [hypothesis.HealthCheck.too_slow]  # how slow examples are is the machine's affair
    hypothesis.settings.register_profile(
        "asyncdp", deadline=None, derandomize=once, print_blob=True, suppress_health_check=slow
    )
    hypothesis.settings.load_profile("asyncdp")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the leak guard of asyncdp.testing look at the tests of some folders; those on Ray have their place."""
    for item in items:
        path = PurePath(order.within_tests(item.path))
        real = path.parts[0] in MEMORY_ONLY and path.name in ON_SERVERS
        real = real or path.name == "test_real_planes.py"  # it shares a process with the session's Ray
        if path.parts[0] in LEAVE_NOTHING and not real and item.get_closest_marker("leaks") is None:
            item.add_marker("leaks")
        if "transfer_queue" in f"{path.parent}/{path.stem}":
            # The first one starts Ray and TransferQueue's actors, which took four minutes beside four busy loops.
            item.add_marker(pytest.mark.timeout(900))
    order.place(config, items)


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each test that is marked anyio on both event loops."""
    backend: str = request.param
    return backend
