"""What all tests share: the two event loops, one thread per process, one hypothesis profile."""

import os

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


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each test that is marked anyio on both event loops."""
    backend: str = request.param
    return backend
