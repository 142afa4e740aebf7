"""The protocol of the control stream: frames, and the messages in them.

A frame is 12 bytes (magic ``ADPW``, version, three zero bytes, length of the body) and a body: one message, packed by
msgpack as an array that begins with the message's number. The types here bound all integers; the code that uses lengths
and indices checks them against the actual data.

::

    host   -> client  Challenge                       at once
    client -> host    Answer                          proves that the client knows the secret
    host   -> client  Welcome                         proves the same of the host; then one reply follows each request
    client -> host    Tie        -> Tied              a UCX connection has sent the token: payload may use it
                      Read       -> Rows              a status per slot; payload follows over UCX, or is in the message
                      Reserve    -> Granted
                      Write      -> Ready, payload, Written    or, with the payload in the message: Written
                                    with a More for each message of payload beyond the first eight
                      Abort, Drop -> Done
                      Ask        -> HostFacts              identity, size and counters of the host
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final, get_args

import msgspec

__all__ = [
    "ALL_KINDS",
    "MAGIC",
    "REPLIES",
    "REQUESTS",
    "Abort",
    "Answer",
    "Ask",
    "Challenge",
    "Done",
    "Drop",
    "Failed",
    "Granted",
    "HostFacts",
    "Kinds",
    "Message",
    "More",
    "PartHead",
    "Read",
    "Ready",
    "Reserve",
    "Rows",
    "SlotRows",
    "Tie",
    "Tied",
    "Welcome",
    "WireError",
    "Write",
    "Written",
    "check_length",
    "lease_id",
    "pack_frame",
    "unpack_body",
    "unpack_head",
]

_HEAD: Final = struct.Struct("<4sB3sI")
HEAD_BYTES: Final = _HEAD.size
MAGIC: Final = b"ADPW"
_VERSION: Final = 4
#: Largest body in bytes from a peer that has not authenticated.
GREETING_BYTES: Final = 1024
#: Largest body in bytes after authentication; enough for a request that names a million rows one by one.
BODY_BYTES: Final = 16 << 20

#: Limits of one request: refs, slots of a write, rows of a put, rows named one by one per ref, and fields. They bound a
#: host's work for a request, because list lengths are checked before items are decoded. Clients split longer requests.
MOST_REFS: Final = 4096
MOST_SLOTS: Final = 1024
MOST_ROWS: Final = 1 << 20
MOST_PICKED: Final = 1 << 18
MOST_FIELDS: Final = 4096
#: Longest time in seconds for which a put may keep its reserved slots, whatever its client asks for.
LONGEST_PUT_S: Final = 3600.0
#: Most slots that one request leases for puts to come.
MOST_LEASES: Final = 16
#: Seconds for which a client may begin to use a leased slot, and after which a host takes one back that is not in use.
LEASE_S: Final = 5.0

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
#: Seconds, at most a week. The bounds also exclude NaN, for which every later comparison would be False.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)]
Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Fields = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_FIELDS)]
FieldLists = Annotated[list[Fields], msgspec.Meta(max_length=MOST_REFS)]


def lease_id(op_id: str, number: int) -> str:
    """Return the id of the put for which a slot was leased, by the put that asked for the lease."""
    return f"{op_id}+{number}"


class WireError(Exception):
    """Raised where a peer violates the protocol; the connection must not be used any more."""


class _Message(msgspec.Struct, array_like=True, frozen=True):
    pass


class Challenge(_Message, frozen=True, tag=1):
    """Host to client: asks for an HMAC, keyed by the shared secret, over this nonce and the client's."""

    nonce: Token


class Answer(_Message, frozen=True, tag=2):
    """Client to host: the proof, and the client's process, by which the host decides whether it may use the lane.

    ``client`` is an id that all connections of one client share and no other client knows; reservations belong to it.
    """

    nonce: Token
    proof: Token
    client: Token = b"\0" * 16
    boot_id: Text = ""
    pid_namespace: Number = 0
    pid: Number = 0
    start: Number = 0


class Welcome(_Message, frozen=True, tag=3):
    """Host to client: the host's own proof, and its identity.

    ``token`` authenticates one UCX connection to ``ucx_port`` (0: the host has no UCX, and all payload is sent in
    messages). The host closes a connection without a request for ``idle_s`` seconds.
    """

    proof: Token
    host_id: Text
    epoch: Number
    boot_id: Text
    arena: Text
    ucx_port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    token: Token
    idle_s: Seconds
    inline_bytes: Count


class Failed(_Message, frozen=True, tag=4):
    """Reply to a request that failed as a whole; ``code`` is the class name of the error."""

    code: Text
    text: str
    retry_after_s: float | None = None


class Tie(_Message, frozen=True, tag=5):
    """Request: wait for the UCX connection that the client has started, and use it for payload."""


class Tied(_Message, frozen=True, tag=6):
    """Reply to Tie: the UCX connection has arrived."""


class SlotRows(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one slot: ``count`` from ``first``, or those in ``rows``; ``fields`` is an index of the field lists."""

    slot: Number
    generation: Number
    fields: Count
    first: Count
    count: Count
    rows: Annotated[list[Count], msgspec.Meta(max_length=MOST_PICKED)] | None = None

    @property
    def index(self) -> range | list[int]:
        """Indices of the rows in the slot."""
        return range(self.first, self.first + self.count) if self.rows is None else self.rows


class Read(_Message, frozen=True, tag=7):
    """Request: read rows of slots. Payload is sent in UCX messages tagged ``tag``, ``tag + 1``, ...; 0: no UCX."""

    fields: FieldLists
    refs: Annotated[list[SlotRows], msgspec.Meta(max_length=MOST_REFS)]
    tag: Number
    epoch: Number


class PartHead(msgspec.Struct, array_like=True, frozen=True):
    """Describes one payload of a reply.

    ``refs`` are positions in the request, ``nbytes`` the data bytes of each; ``size`` is the payload's length in bytes.
    """

    refs: Annotated[list[Count], msgspec.Meta(max_length=MOST_REFS)]
    nbytes: Annotated[list[Count], msgspec.Meta(max_length=MOST_REFS)]
    schema: Number
    size: Count
    rows: Count
    checksums: Annotated[list[Number], msgspec.Meta(max_length=MOST_REFS)] | None = None


class Rows(_Message, frozen=True, tag=8):
    """Reply to Read: the payloads, and (position, code, text, retry_after_s) of each ref that could not be read."""

    parts: Annotated[list[PartHead], msgspec.Meta(max_length=MOST_REFS)]
    errors: Annotated[list[tuple[Count, str, str, float | None]], msgspec.Meta(max_length=MOST_REFS)]
    inline: bytes | None = None


class Reserve(_Message, frozen=True, tag=9):
    """Request: reserve slots. ``lane``: the client will copy itself; a full host may wait ``wait_s`` for space.

    ``ahead``: number of further slots of this kind, for puts to come. The k-th is known by ``lease_id(op_id, k)``.
    """

    op_id: Text
    fields: Fields
    sizes: Annotated[list[Count], msgspec.Meta(max_length=MOST_ROWS)]
    first_row: Count
    ttl_s: Seconds
    wait_s: Seconds
    lane: bool
    epoch: Number
    ahead: Annotated[int, msgspec.Meta(ge=0, le=MOST_LEASES)] = 0


class Granted(_Message, frozen=True, tag=10):
    """Reply to Reserve: (slot, generation, rows, first row) of each slot; ``lane``: the client may copy itself.

    ``leases``: (slot, generation) of slots for puts to come, at most as many as the client asked for.
    """

    grants: Annotated[list[tuple[Number, Number, Count, Count]], msgspec.Meta(max_length=MOST_ROWS)]
    lane: bool
    leases: Annotated[list[tuple[Number, Number]], msgspec.Meta(max_length=MOST_LEASES)] = []


class Write(_Message, frozen=True, tag=11):
    """Request: write payloads into reserved slots, (slot, generation, length) each."""

    op_id: Text
    slots: Annotated[list[tuple[Number, Number, Count]], msgspec.Meta(max_length=MOST_SLOTS)]
    epoch: Number
    checksums: Annotated[list[Number], msgspec.Meta(max_length=MOST_SLOTS)] | None = None
    inline: bytes | None = None


class Ready(_Message, frozen=True, tag=12):
    """Reply to Write: the client is to send the payloads, joined and split by ``chunks``, tagged from ``tag`` upwards.

    It sends the first ``AHEAD`` messages at once and each further one after a More, because the host drops messages
    that it does not expect yet.
    """

    tag: Number


class More(_Message, frozen=True, tag=19):
    """Host to client: one more message of a write is expected."""


class Written(_Message, frozen=True, tag=13):
    """Reply to Write: the payloads were received and are valid."""


class Abort(_Message, frozen=True, tag=14):
    """Request: free what a put reserved. ``idle``: the client, which reserved it, copies no row of it any more."""

    op_id: Text
    idle: bool


class Drop(_Message, frozen=True, tag=15):
    """Request: end the life of rows; of these fields only, where a ref's field list is not empty."""

    fields: FieldLists
    refs: Annotated[list[SlotRows], msgspec.Meta(max_length=MOST_REFS)]
    epoch: Number


class Done(_Message, frozen=True, tag=16):
    """Reply to Abort (``count``: slots that stay occupied for now) and Drop (``count``: refs that were found)."""

    count: Count


class Ask(_Message, frozen=True, tag=17):
    """Request: the identity, size and counters of the host."""


class HostFacts(_Message, frozen=True, tag=18):
    """Reply to Ask: facts by name."""

    facts: dict[str, int | float | str]


#: What clients send and what hosts send.
Request = Answer | Tie | Read | Reserve | Write | Abort | Drop | Ask
Reply = Challenge | Welcome | Failed | Tied | Rows | Granted | Ready | More | Written | Done | HostFacts
Message = Request | Reply
#: Largest body in bytes by kind; a longer one is not decoded. A Write, which may contain payload, a Reserve, which
#: names each row, and replies have the limit of the frame.
_BODY_OF_KIND: Final = dict.fromkeys((Failed, Rows, Reserve, Granted, Write, HostFacts), BODY_BYTES) | dict.fromkeys(
    (Read, Drop), 2 << 20
)
#: The same of all other messages.
_SMALL_BYTES: Final = 16 << 10
#: Bytes of a body by which its kind is known: the head of an array of less than 16 items, and the message's number.
START_BYTES: Final = 2


class Kinds:
    """The kinds of messages that one side of a connection may receive.

    Args:
        message: The kinds, as a union of classes.

    Attributes:
        most: Largest body in bytes by message number.
        decoder: Decodes these kinds only.
    """

    def __init__(self, message: Any) -> None:
        """Collect the limits of the kinds."""
        kinds = get_args(message)
        self.most = {kind.__struct_config__.tag: _BODY_OF_KIND.get(kind, _SMALL_BYTES) for kind in kinds}
        self.decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message)


#: What a host receives, what a client receives, and both.
REQUESTS: Final = Kinds(Request)
REPLIES: Final = Kinds(Reply)
ALL_KINDS: Final = Kinds(Message)


def pack_frame(message: Message) -> bytes:
    """Return the frame of a message."""
    body = msgspec.msgpack.encode(message)
    if len(body) > BODY_BYTES:
        raise WireError(f"a message of {len(body)} bytes is longer than {BODY_BYTES}")
    return _HEAD.pack(MAGIC, _VERSION, b"\0\0\0", len(body)) + body


def unpack_head(head: bytes | bytearray, most: int) -> int:
    """Return the length in bytes of the body of the frame that ``head`` begins with.

    Raises:
        WireError: The bytes are no head of a frame, or the body would be longer than ``most``.
    """
    magic, version, spare, length = _HEAD.unpack_from(head)
    if magic == MAGIC and version != _VERSION and spare == b"\0\0\0":
        raise WireError(f"it speaks version {version} of the wire, this asyncdp version {_VERSION}: use one release")
    if magic != MAGIC or version != _VERSION or spare != b"\0\0\0":
        raise WireError(f"no frame of asyncdp: {bytes(head[:HEAD_BYTES])!r}")
    if length > most:
        raise WireError(f"a frame of {length} bytes, {most} are allowed")
    return int(length)


def check_length(start: bytes | bytearray | memoryview, length: int, kinds: Kinds = ALL_KINDS) -> None:
    """Check that a body of ``length`` bytes that begins with ``start`` is not longer than its kind allows.

    Other encodings of the same head and number are not accepted for long bodies, since they would hide the kind.

    Raises:
        WireError: It is longer.
    """
    if length <= GREETING_BYTES or len(start) < START_BYTES:
        return
    kind = start[1] if start[0] & 0xF0 == 0x90 else -1  # noqa: PLR2004 - msgpack's short arrays
    if length > kinds.most.get(kind, 0):
        raise WireError(f"a message of {length} bytes, longer than any of kind {kind}")


def unpack_body(body: bytes | bytearray | memoryview, kinds: Kinds = ALL_KINDS) -> Message:
    """Decode the message in a body.

    Raises:
        WireError: The body is no valid message, of none of these kinds, or longer than its kind allows.
    """
    if len(body) > GREETING_BYTES:
        check_length(body[:START_BYTES], len(body), kinds)
    try:
        return kinds.decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as err:
        raise WireError(f"no message: {err}") from err
