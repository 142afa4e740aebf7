"""The contract suite: what every backend promises, as tests that any transport can be put to.

A transport that somebody else wrote is tested by a class with one fixture, and pytest with anyio's plugin::

    import pytest
    from . import DataPlaneContract, Opener, by_config
    from my_plane import MyTransport

    class TestMyTransport(DataPlaneContract):
        @pytest.fixture
        def open_plane(self) -> Opener:
            return by_config(MyTransport, impl="mine", mine={"ports": 2})

:func:`by_config` is for transports that are made like those of asyncdp: ``MyTransport(config, bootstrap=True)`` starts
a plane, ``MyTransport(first.attach_config(), bootstrap=False)`` attaches another client to it. One that is made in
another way says itself how a plane is opened, and how a second transport is attached to it::

    class TestMyTransport(DataPlaneContract):
        loops = ("asyncio",)  # where it does not run on trio

        @pytest.fixture
        def open_plane(self, my_server: Server) -> Opener:
            @asynccontextmanager
            async def opened(config: dict[str, Any]) -> AsyncIterator[Plane]:
                first = await MyTransport.start(my_server, **config)
                yield Plane(first, lambda config: MyTransport.attached(first.address, **config))

            return opened

``config`` holds the keys of :class:`~asyncdp.config.DataPlaneConfig` that a test wants to differ, few and mostly none.
The suite puts the default layers around each transport (:func:`~asyncdp.factory.stack`), opens a fresh plane for each
test and closes all clients at its end; ``opened`` ends what is then left. What is costly to start (servers) belongs in
a fixture of the session, which ``open_plane`` asks for.

What a transport's capabilities say that it cannot do is skipped, with that reason. Each theme of the contract is a
class of its own (:class:`Rows`, :class:`Claims`, ...): a transport under construction may begin with one of them, and
``DataPlaneContract`` is all of them. Tests are anyio's: with pytest-asyncio installed, leave its mode at ``strict``
(in its mode ``auto``, which has no trio, a class needs ``loops = ("asyncio",)``).
"""

import pkgutil

import pytest

# Before the modules are imported: their asserts then show values when they fail.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

from .asyncio_native import AsyncioNative
from .base import Contract
from .bound import Bound
from .cancels import Cancels
from .claim_faults import ClaimFaults
from .claim_release import ClaimRelease
from .claim_waits import ClaimWaits
from .claims import Claims
from .clears import Clears
from .closing import Closing
from .deadlines import Deadlines
from .errors import Errors
from .forks import Forks
from .groups import Groups
from .interleavings import Interleavings
from .many_loops import ManyLoops
from .metadata import Metadata
from .misuse import Misuse
from .objects import Objects
from .observers import Observers
from .plain_names import PlainNames
from .put_faults import PutFaults
from .put_limits import PutLimits
from .puts import Puts
from .read_faults import ReadFaults
from .reads import Reads
from .recovery_verbs import RecoveryVerbs
from .rig import Opener, Plane, Rig, by_config
from .rows import Rows
from .stale import Stale

__all__ = [
    "AsyncioNative",
    "Bound",
    "Cancels",
    "ClaimFaults",
    "ClaimRelease",
    "ClaimWaits",
    "Claims",
    "Clears",
    "Closing",
    "Contract",
    "DataPlaneContract",
    "Deadlines",
    "Errors",
    "Forks",
    "Groups",
    "Interleavings",
    "ManyLoops",
    "Metadata",
    "Misuse",
    "Objects",
    "Observers",
    "Opener",
    "PlainNames",
    "Plane",
    "PutFaults",
    "PutLimits",
    "Puts",
    "ReadFaults",
    "Reads",
    "RecoveryVerbs",
    "Rig",
    "Rows",
    "Stale",
    "by_config",
]


class DataPlaneContract(
    # promises 1, 2, 6
    Rows,
    Objects,
    Reads,
    ReadFaults,
    Stale,
    # 3
    Puts,
    PutFaults,
    PutLimits,
    Bound,
    Interleavings,
    # 4, 5
    Claims,
    Groups,
    ClaimWaits,
    ClaimRelease,
    ClaimFaults,
    # 7, 8, 9
    Clears,
    Metadata,
    RecoveryVerbs,
    # 10, 10b, 11
    Deadlines,
    Forks,
    ManyLoops,
    Cancels,
    AsyncioNative,
    Closing,
    # who asks wrongly, and who watches
    Misuse,
    PlainNames,
    Errors,
    Observers,
):
    """All that a backend promises; see :mod:`asyncdp.testing.contract`."""
