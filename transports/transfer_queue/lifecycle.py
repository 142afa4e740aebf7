"""The part of the transport that opens and closes it: config, bootstrap, attaching, closing."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdp.config import Config, TransferQueueSettings, parse_config, plain_config, shared_config
from asyncdp.errors import DataPlaneError
from asyncdp.log_line import log_line
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.service import Service

from .connection.link import Link
from .connection.plane_connection import PlaneConnection, in_a_loop_of_its_own
from .controller.directory_server import DirectoryServer
from .endpoints import Endpoints, address_towards
from .mooncake.master import check_import
from .mooncake.unit import PROTOCOL, transport_settings
from .private import META, prepare_environment

if TYPE_CHECKING:
    from asyncdp.calls import CallContext

__all__ = ["Lifecycle"]

#: Maximum time in seconds that close() spends on requests to the plane.
CLOSE_S = 2.0
#: Minimum size in bytes of memory that is pooled; the allocator serves less from its own free lists.
POOLED_BYTES = 4 << 20
#: Settings that a plane fixes for all of its clients: {name in the directory: name in the config}.
SAME = {
    "capacity": "storage_capacity",
    "group_pattern": "group_id_pattern",
    "strict_schema": "strict_schema",
    "auto_register": "auto_register",
}


class Lifecycle(Service):
    """Starts a plane or attaches to one, and closes the connection."""

    def __init__(self, config: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        """Start a plane, or store the address to attach to."""
        super().__init__()
        parsed = parse_config(config)
        self._settings = parsed.transfer_queue or TransferQueueSettings()
        self._raw = plain_config(config)
        self.call_timeout_s = parsed.call_timeout_s
        self._lease_s = parsed.claim_lease_s
        self._owner = parsed.owner or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        #: Forms of the fields of a layout, by (epoch, layout).
        self._forms: dict[tuple[int, int], dict[str, tuple[Any, ...]]] = {}
        self._pool = BufferPool(keep_bytes=self._settings.read_pool_bytes, least_bytes=POOLED_BYTES, huge_pages=False)
        #: Storage keys of a group with a checksum mismatch; their rows are read one by one, once.
        self._suspects: set[int] = set()
        self._cluster: Any = None
        self._owned_epoch: str | None = None
        prepare_environment(self._settings.unit_timeout_s)
        endpoints = None if self._settings.endpoints is None else Endpoints.from_config(self._settings.endpoints)
        if endpoints is not None:
            there = "simple" if endpoints.mooncake is None else "mooncake_cpu"
            if parsed.backend != there:
                msg = f"backend: the plane at transfer_queue.endpoints is of {there!r}, not {parsed.backend!r}"
                raise ValueError(msg)
            if endpoints.mooncake is not None:
                plane = {PROTOCOL: endpoints.mooncake["protocol"]}
                transport_settings(address_towards(endpoints.controller), plane)
                check_import()
        find = None
        if endpoints is None or parsed.controller_address is not None:
            from .cluster.actors import Cluster

            self._cluster = Cluster(parsed, self._settings)
            find = self._cluster.find
            if bootstrap and endpoints is None:
                endpoints = self._cluster.start()
            elif endpoints is None:
                self._cluster.check_named()
        self._server: DirectoryServer | None = None
        self._connection = PlaneConnection(
            self._settings, endpoints, find, None if self._cluster is None else self._cluster.described
        )
        if bootstrap:
            try:
                in_a_loop_of_its_own(lambda: self._open(parsed, endpoints))
            except BaseException:
                self._stop_servers()
                raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the config; the unpickled transport attaches to the same plane."""
        return _attach, (type(self), self.attach_config())

    def attach_config(self) -> dict[str, Any]:
        """Return a config with which clients in any process attach to the plane."""
        config = shared_config(self._raw)
        if self._cluster is not None:
            config["controller_address"] = self._cluster.address
        own = dict(config.get("transfer_queue") or {})
        if self._connection.endpoints is not None:
            own["endpoints"] = self._connection.endpoints.to_config()
        config["transfer_queue"] = own
        return config

    @property
    def owner(self) -> str:
        """Name of this client towards the plane, the owner of its claims and puts."""
        return self._owner

    async def _open(self, parsed: Config, endpoints: Endpoints | None) -> None:
        """Open a plane on the controller, or check that the open one has the same config."""
        assert endpoints is not None  # noqa: S101 - given, or just started
        wanted = {
            "capacity": parsed.storage_capacity,
            "group_pattern": parsed.group_id_pattern,
            "strict_schema": parsed.strict_schema,
            "auto_register": parsed.auto_register,
        }
        units = [unit.id for unit in endpoints.units[: parsed.num_storage_units]]
        if len(units) < parsed.num_storage_units:
            msg = f"num_storage_units: {parsed.num_storage_units} are wanted, TransferQueue runs {len(units)} here"
            raise ValueError(msg)
        link = await Link.open(endpoints, self._settings, self._connection.infos)
        try:
            deadline = anyio.current_time() + self._settings.bootstrap_timeout_s
            await link.client.reserve(link.partition)
            if not await link.find_directory(deadline):
                await self._serve_directory(link)
            self._connection.endpoints = link.endpoints
            new = await link.ask("open", (units, wanted), deadline)
            if new:
                self._owned_epoch = link.epoch
                return
            await link.hello(deadline)
            for key, name in SAME.items():
                if link.config[key] != wanted[key]:
                    msg = f"{name}: the plane that is there has {link.config[key]!r}, not {wanted[key]!r}"
                    raise ValueError(msg)
            if len(link.config["units"]) != len(units):
                msg = f"num_storage_units: the plane that is there has {len(link.config['units'])}, not {len(units)}"
                raise ValueError(msg)
        finally:
            link.close()

    async def _serve_directory(self, link: Link) -> None:
        """Run the directory in this process, for a controller that does not run our sampler."""
        why = "the controller runs a sampler that is not asyncdp's"
        if META in link.client.missing:
            why = f"TransferQueue lacks {link.client.missing[META]}"
        elif self._cluster is not None and self._cluster.lacking:
            why = f"TransferQueue lacks {self._cluster.lacking}"
        log_line("warning", "transfer_queue_directory_beside_the_controller", why=why)
        self._server = DirectoryServer(address_towards(link.endpoints.controller))
        await link.client.publish_directory(link.partition, self._server.server.to_config())
        link.move_to(self._server.server)

    def _stop_servers(self) -> None:
        """Stop the servers that this client started; blocks."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._cluster is not None:
            self._cluster.stop()

    # -- requests

    async def _ask(self, op: str, args: Sequence[Any], ctx: CallContext, partition_id: str | None = None) -> Any:
        """Send a request that is read-only or idempotent."""
        try:
            return await self._connection.ask(op, args, ctx.deadline, partition_id)
        except DataPlaneError as err:
            err.ambiguous = False
            raise

    async def _mutate(self, op: str, args: Sequence[Any], ctx: CallContext, partition_id: str | None = None) -> Any:
        """Send a request that changes something."""
        return await self._connection.ask(op, args, ctx.deadline, partition_id)

    async def _not_after(self, ctx: CallContext) -> float:
        """Return the deadline by the directory's clock, plus 0.5 s for the error of the measured clock offset."""
        link = await self._connection.link(ctx.deadline)
        return ctx.deadline + link.offset_s + 0.5

    # -- closing

    async def on_close(self) -> None:
        """Close the plane if this client opened it, and stop the actors if it started them."""
        connection = self._connection
        started = self._cluster is not None and self._cluster.started
        if self._owned_epoch is not None and not started:
            with anyio.move_on_after(CLOSE_S):
                try:
                    link = await connection.link(anyio.current_time() + CLOSE_S)
                    keys = await link.ask("close", (self._owned_epoch,), anyio.current_time() + CLOSE_S)
                    await link.clear(keys, anyio.current_time() + CLOSE_S)
                except DataPlaneError:
                    pass  # the plane is closed already
        connection.close()
        self._pool.clear()
        if self._cluster is not None or self._server is not None:
            await anyio.to_thread.run_sync(self._stop_servers)


def _attach(kind: type[Lifecycle], config: dict[str, Any]) -> Lifecycle:
    return kind(config, bootstrap=False)
