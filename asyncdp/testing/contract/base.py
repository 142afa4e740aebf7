"""Base of all themes of the contract: fixtures for the plane under test, and the event loops to test it on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, TypeVar

import pytest

from .rig import Opener, Rig

__all__ = ["Contract", "asyncio_only"]

F = TypeVar("F", bound=Callable[..., Any])


def asyncio_only(test: F) -> F:
    """Run a test on asyncio only, because it uses asyncio's own cancellation."""
    test.loops = ("asyncio",)  # type: ignore[attr-defined]
    return test


def _taken_by_pytest_asyncio(config: pytest.Config) -> bool:
    if not config.pluginmanager.has_plugin("asyncio"):
        return False
    mode = config.getoption("asyncio_mode", None) or config.getini("asyncio_mode")
    return str(mode) in ("auto", "Mode.AUTO")


class Contract:
    """Base class of the themes of the contract; subclasses contain the tests as methods.

    Attributes:
        loops: The event loops that the transport works on; each test is run once on each.
    """

    loops: ClassVar[tuple[str, ...]] = ("asyncio", "trio")

    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [
        pytest.mark.anyio,
        # torch warns of every jagged tensor and of complex32; rows may be either.
        pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
        pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    ]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on each loop."""
        if "anyio_backend" in metafunc.fixturenames:
            allowed = getattr(metafunc.function, "loops", self.loops)
            metafunc.parametrize("anyio_backend", [loop for loop in self.loops if loop in allowed], indirect=True)

    @pytest.fixture
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        """Name the event loop of this run of a test, for anyio's pytest plugin."""
        if request.param == "trio" and _taken_by_pytest_asyncio(request.config):
            pytest.fail(
                "asyncio_mode = auto has pytest-asyncio run every async test, on asyncio: the contract needs "
                "asyncio_mode = strict to run on trio, or a class with loops = ('asyncio',)",
                pytrace=False,
            )
        return str(request.param)

    @pytest.fixture
    def open_plane(self) -> Opener:
        """Return a function that opens a fresh plane; subclasses have to override this fixture."""
        pytest.fail(f"{type(self).__name__} has no fixture open_plane: see asyncdp.testing.contract", pytrace=False)

    @pytest.fixture
    async def rig(self, open_plane: Opener, anyio_backend: str) -> AsyncIterator[Rig]:
        """Yield a fresh plane with two clients; at the end, check that calls left nothing behind in the plane."""
        del anyio_backend  # requested so that anyio's plugin runs the test
        async with Rig(open_plane) as made:
            yield made
