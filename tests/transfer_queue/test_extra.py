import importlib.util
import subprocess
import sys

import pytest

CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "storage_capacity": 8,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.1,
    "global_segment_size": 1,
    "local_buffer_size": 1,
}
BLOCKED = f"""
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transfer_queue" else found(name, *rest)
import asyncdp
try:
    asyncdp.build_data_plane_client({CONFIG!r})
except ImportError as err:
    print(err, "| cause:", repr(err.__cause__))
"""


@pytest.mark.slow
def test_without_the_extra_opening_names_it_and_keeps_the_cause() -> None:
    """X5: asyncdp imports; opening the impl says what to install."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=100, check=True)
    assert "asyncdp[tq]" in done.stdout
    assert "cause: ImportError" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("transfer_queue") is None, reason="needs the extra: asyncdp[tq]")
def test_the_other_tests_of_this_folder_are_collected() -> None:
    """Skipped where the extra is missing, so that the report names it."""
    assert importlib.util.find_spec("ray") is not None
