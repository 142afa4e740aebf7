"""What all tests share: the two event loops, one thread per process, one hypothesis profile."""

import os
from pathlib import Path

# Read by the OpenMP runtime when torch is loaded, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests.parts import pytest_runtest_logreport, pytest_terminal_summary

__all__ = ["anyio_backend", "pytest_runtest_logreport", "pytest_terminal_summary"]

torch.set_num_threads(1)

# No deadline: on a shared machine a slow example is no finding. In CI the same examples each time, so that a red run
# is about the change under test.
hypothesis.settings.register_profile("asyncdp", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
hypothesis.settings.load_profile("asyncdp")


#: Folders whose tests must leave nothing behind. The others start servers whose libraries keep threads, sockets and
#: processes as they like; they look themselves at what is theirs.
LEAVE_NOTHING = frozenset({"contract", "docs", "layers", "sans_io", "seam", "sweep", "testing", "unit", "user_style"})
#: Run last: once Ray runs for the session, its threads in this process open and close sockets whenever they like.
ON_RAY = (
    "chaos/test_transfer_queue.py",
    "contract/test_transfer_queue.py",
    "examples/test_grpo_processes.py",
    "sweep/test_transfer_queue.py",
    "testing/test_real_planes.py",
    "transfer_queue/",
)
#: In these only what runs in memory.
MEMORY_ONLY = frozenset({"contract", "sweep"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the leak guard of asyncdp.testing look at the tests of some folders; those on Ray come last."""
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here) if item.path.is_relative_to(here) else item.path
        real = path.parts[0] in MEMORY_ONLY and path.name in ("test_transfer_queue.py", "test_ucxx.py")
        if path.parts[0] in LEAVE_NOTHING and not real and item.get_closest_marker("leaks") is None:
            item.add_marker("leaks")
    items.sort(key=lambda item: item.path.is_relative_to(here) and str(item.path.relative_to(here)).startswith(ON_RAY))


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each test that is marked anyio on both event loops."""
    backend: str = request.param
    return backend
