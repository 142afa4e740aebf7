"""The contract suite: tests of everything that a backend promises, which can be run on any transport.

To test a transport of your own, write a class with one fixture and run it with pytest and anyio's plugin::

    import pytest
    from asyncdp.testing.contract import DataPlaneContract, Opener, by_config
    from my_plane import MyTransport

    class TestMyTransport(DataPlaneContract):
        @pytest.fixture
        def open_plane(self) -> Opener:
            return by_config(MyTransport, impl="mine", mine={"ports": 2})

:func:`by_config` is for transports with the constructor of those of asyncdp: ``MyTransport(config, bootstrap=True)``
starts a plane, and ``MyTransport(first.attach_config(), bootstrap=False)`` attaches another client to it. For any other
constructor, the fixture itself opens a plane and says how a second transport is attached to it::

    class TestMyTransport(DataPlaneContract):
        loops = ("asyncio",)  # if the transport does not run on trio

        @pytest.fixture
        def open_plane(self, my_server: Server) -> Opener:
            @asynccontextmanager
            async def opened(config: dict[str, Any]) -> AsyncIterator[Plane]:
                first = await MyTransport.start(my_server, **config)
                yield Plane(first, lambda config: MyTransport.attached(first.address, **config))

            return opened

``config`` holds the keys of :class:`~asyncdp.config.DataPlaneConfig` that a test sets; for most tests it is empty. The
suite puts the default layers around each transport (:func:`~asyncdp.layering.stack`), opens a fresh plane for each test
and closes all clients at its end; ``opened`` then shuts down whatever else it started. Servers that are slow to start
belong in a session-scoped fixture that ``open_plane`` requests.

Tests that need a capability which the transport does not declare are skipped with that reason. Each theme of the
contract is a class of its own (:class:`Rows`, :class:`Claims`, ...), so that a transport under construction can start
with one of them; ``DataPlaneContract`` combines all. Docstrings of tests name promises and cases by the ids of
``asyncdp/testing/PROMISES.md``. The tests are run by anyio's plugin: with pytest-asyncio
installed, leave its mode at ``strict``. Its mode ``auto`` does not support trio; a class then needs
``loops = ("asyncio",)``.
"""

import pkgutil

import pytest

# This has to come before the imports of these modules, so that pytest rewrites their asserts to show values.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

from .arguments.errors import Errors
from .arguments.misuse import Misuse
from .arguments.observers import Observers
from .arguments.plain_names import PlainNames
from .base import Contract
from .calls.asyncio_native import AsyncioNative
from .calls.cancels import Cancels
from .calls.closing import Closing
from .calls.deadlines import Deadlines
from .calls.forks import Forks
from .calls.many_loops import ManyLoops
from .claims.claim_faults import ClaimFaults
from .claims.claim_release import ClaimRelease
from .claims.claim_waits import ClaimWaits
from .claims.claims import Claims
from .claims.groups import Groups
from .claims.snapshots import Snapshots
from .partitions.clears import Clears
from .partitions.metadata import Metadata
from .partitions.recovery_verbs import RecoveryVerbs
from .puts.bound import Bound
from .puts.interleavings import Interleavings
from .puts.put_faults import PutFaults
from .puts.put_limits import PutLimits
from .puts.puts import Puts
from .rig import Opener, Plane, Rig, by_config
from .values.objects import Objects
from .values.read_faults import ReadFaults
from .values.reads import Reads
from .values.rows import Rows
from .values.stale import Stale

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
    "Snapshots",
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
    Snapshots,
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
    # invalid requests, and observers of a client
    Misuse,
    PlainNames,
    Errors,
    Observers,
):
    """The whole contract: the tests of all themes; see :mod:`asyncdp.testing.contract` for how to run them."""
