"""Calls of the server's functions, and the interpretation of their replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import quote

from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
)

from ..encoding.msgpack_codec import load
from ..encoding.operation_ids import OperationId
from ..encoding.schema import ABSENT, Schema

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..server.link import DirectoryLink
    from ..settings import DirectorySettings

__all__ = ["Answer", "Base"]

#: Codes of the replies, as in the Lua library.
OK, SCHEMA, UNKNOWN, REFUSED, LATE, ERROR, INDEXING = range(7)
#: Most attempts of a put or claim whose schema changes meanwhile; after that it is DataPlaneNotReady.
MOST_TURNS = 64
#: A version that no schema has: the server replies with the remembered outcome of the op_id, or that it has none.
NO_VERSION = b"?"
NO_OP = OperationId("", 0.0)


async def no_name() -> None:
    """Prepare nothing for a partition that is unknown, as what makes none needs no name."""


class Answer(NamedTuple):
    """The reply of the server, and the schema that it refers to."""

    blob: bytes
    schema: Schema


class Base:
    """Base of all parts of the directory's client: requests, and the cache of schemas.

    Args:
        link: Connections to the server.
        settings: Configuration of the client.
    """

    def __init__(self, link: DirectoryLink, settings: DirectorySettings) -> None:
        """Start with no cached schemas."""
        self._link = link
        self._settings = settings
        self._schemas: dict[str, Schema] = {}
        self._known: dict[str, str] = {}
        self._closed = False

    def _key(self, partition_id: str) -> str:
        """Return the prefix of a partition's keys; the part in braces determines the cluster node that holds them."""
        name = quote(partition_id, safe=" !\"#$&'()*+,-./:;<=>?@[]^_`|~", errors="surrogatepass")
        return f"{self._settings.namespace}:{{{name}}}:"

    async def _open(self) -> None:
        if self._closed:
            raise DataPlaneClosed("the directory's client is closed")
        await self._link.ready()

    # -- requests

    async def _send(self, verb: str, partition_id: str, payload: bytes, version: bytes, op: OperationId) -> list[Any]:
        not_after = self._link.server_us(op.left_s) if op.id else 0
        reply: list[Any] = await self._link.function(verb, self._key(partition_id), op.id, not_after, version, payload)
        return reply

    async def _ask(self, verb: str, partition_id: str, payload: bytes = b"", op: OperationId = NO_OP) -> bytes:
        """Send a request that does not depend on the schema; an unknown partition is an error."""
        await self._open()
        reply = await self._send(verb, partition_id, payload, NO_VERSION, op)
        if reply[0] == OK:
            blob: bytes = reply[1]
            return blob
        return await self._refused(reply, partition_id)

    async def _serve(
        self,
        verb: str,
        partition_id: str,
        make: Callable[[Schema], bytes],
        op: OperationId = NO_OP,
        *,
        create: Callable[[], Awaitable[None]] | None = None,
        wrong: Callable[[list[Any]], DataPlaneError] | None = None,
    ) -> Answer:
        """Send a request that depends on the schema: build it by the cached one, and again if the server has another.

        Args:
            verb: Name of the function.
            partition_id: Partition that the request is about.
            op: Identifies the request, if it is a mutation.
            make: Builds the payload by a schema; its error is raised once the schema is known to be the newest.
            create: Awaited before an unknown partition is treated as one without declaration; None: it is an error.
            wrong: Builds the error of an objection by the server.
        """
        await self._open()
        schema = self._schemas.get(partition_id)
        newest = False
        for _ in range(MOST_TURNS):
            try:
                if schema is None:
                    schema = await self._fetch(partition_id, create)
                    newest = True
                payload = make(schema)
            except DataPlaneError:
                if schema is not None and not newest:
                    schema = None
                    continue
                done = await self._remembered(verb, partition_id, op)
                if done is None:
                    raise
                return Answer(done, schema or ABSENT)
            reply = await self._send(verb, partition_id, payload, schema.version, op)
            code = reply[0]
            if code in (OK, INDEXING):
                self._known[partition_id] = self._link.epoch
                return Answer(reply[1], schema)
            if code == SCHEMA:
                schema = self._schemas[partition_id] = Schema.load(reply[1], reply[2])
                newest = True
            elif code == UNKNOWN and create is not None:
                schema = None
            elif code == ERROR and wrong is not None:
                raise wrong(load(reply[1]))
            else:
                await self._refused(reply, partition_id)
        msg = f"the schema of partition {partition_id!r} keeps changing"
        raise DataPlaneNotReady(msg, partition_id=partition_id, retry_after_s=0.05)

    async def _fetch(self, partition_id: str, create: Callable[[], Awaitable[None]] | None = None) -> Schema:
        """Fetch and cache the schema of a partition; an unknown one is ABSENT after ``create``, where that is given."""
        reply = await self._send("describe", partition_id, b"", NO_VERSION, NO_OP)
        if reply[0] != OK:
            self._schemas.pop(partition_id, None)
            if reply[0] == UNKNOWN and create is not None:
                await create()
                return ABSENT
            await self._refused(reply, partition_id)
        version, doc = load(reply[1])[:2]
        schema = self._schemas[partition_id] = Schema.load(version, doc)
        self._known[partition_id] = self._link.epoch
        return schema

    async def _remembered(self, verb: str, partition_id: str, op: OperationId) -> bytes | None:
        """Return the server's remembered reply to a mutation that the current schema forbids, or None."""
        if not op.id:
            return None
        reply = await self._send(verb, partition_id, b"", NO_VERSION, op)
        if reply[0] == OK:
            blob: bytes = reply[1]
            return blob
        if reply[0] in (REFUSED, LATE):
            await self._refused(reply, partition_id)
        return None

    # -- refusals

    async def _refused(self, reply: list[Any], partition_id: str) -> NoReturn:
        code = reply[0]
        if code == REFUSED:
            raise DataPlaneWriteError("this request was given up and is refused", partition_id=partition_id)
        if code == LATE:
            msg = "the request came after its deadline and is refused"
            raise DataPlaneTimeout(msg, partition_id=partition_id, blames_port=False)
        if code == UNKNOWN:
            self._schemas.pop(partition_id, None)
            raise await self._unknown(partition_id)
        raise DataPlaneError(f"the directory answered {reply!r:.200}", partition_id=partition_id)

    async def _unknown(self, partition_id: str) -> DataPlaneError:
        """Return the error of an unknown partition: not registered, or lost by a server restarted without its data."""
        known = self._known.get(partition_id)
        if known is not None and await self._link.forget() != known:
            msg = f"the plane was restarted and does not know partition {partition_id!r} any more"
            return DataPlaneUnavailable(msg, partition_id=partition_id, blames_port=False)
        msg = f"no partition {partition_id!r} is registered"
        return DataPlaneBadRequest(msg, partition_id=partition_id, field="partition_id")
