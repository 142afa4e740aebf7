"""What travels on the control stream: frames, and the messages in them.

A frame is 12 bytes (magic ``ADPW``, version, three zero bytes, length of the body) and a body: one message, packed by
msgpack as an array that begins with the message's number. All integers are bounded by their types here, lengths and
indices are checked against what is there by whoever uses them.

::

    host   -> client  Challenge                       at once
    client -> host    Answer                          it knows the secret
    host   -> client  Welcome                         so does the host; from here on one request, one reply
    client -> host    Tie        -> Tied              a UCX connection showed the token: payload may travel there
                      Read       -> Rows              one status per slot; payload follows in messages, or lies within
                      Reserve    -> Granted
                      Write      -> Ready, payload, Written    or the payload lies within: Written
                                    of many messages: More for each beyond the first eight
                      Abort, Drop -> Done
                      Ask        -> Told              what the host has and does
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

__all__ = [
    "MAGIC",
    "Abort",
    "Answer",
    "Ask",
    "Challenge",
    "Done",
    "Drop",
    "Failed",
    "Granted",
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
    "Told",
    "Welcome",
    "WireError",
    "Write",
    "Written",
    "pack_frame",
    "unpack_body",
    "unpack_head",
]

_HEAD: Final = struct.Struct("<4sB3sI")
HEAD_BYTES: Final = _HEAD.size
MAGIC: Final = b"ADPW"
_VERSION: Final = 2
#: Before a peer has shown that it knows the secret, it may send so much at once.
GREETING_BYTES: Final = 1024
#: And afterwards: a request that names a million rows one by one.
BODY_BYTES: Final = 16 << 20

#: Slots that one request names at the most, and rows of a put: a host's work for one request is bounded by them before
#: it begins, for lengths are looked at before anything in a list is decoded. Clients cut longer requests.
MOST_REFS: Final = 4096
MOST_SLOTS: Final = 1024
MOST_ROWS: Final = 1 << 20
MOST_PICKED: Final = 1 << 18
MOST_FIELDS: Final = 4096
#: A put may take so long at the most, in seconds, however long its client says: what it reserved is its until then.
LONGEST_PUT_S: Final = 3600.0

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
#: At most a week; no NaN either, which every comparison would let through.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)]
Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Fields = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_FIELDS)]
FieldLists = Annotated[list[Fields], msgspec.Meta(max_length=MOST_REFS)]


class WireError(Exception):
    """What came is no frame of ours; the connection is of no use any more."""


class _Message(msgspec.Struct, array_like=True, frozen=True):
    pass


class Challenge(_Message, frozen=True, tag=1):
    """Prove that you know the secret: its HMAC over this nonce and yours."""

    nonce: Token


class Answer(_Message, frozen=True, tag=2):
    """The proof, and who asks: so that the host knows whether it may use the arena itself.

    ``client`` is the same on all connections of one client and known to no other: what it reserved is its own.
    """

    nonce: Token
    proof: Token
    client: Token = b"\0" * 16
    boot_id: Text = ""
    pid_namespace: Number = 0
    pid: Number = 0
    start: Number = 0


class Welcome(_Message, frozen=True, tag=3):
    """The host's own proof, and what it is.

    ``token`` is good for one UCX connection to ``ucx_port`` (0: there is none, all payload lies within). The host
    closes a connection that asks nothing for ``idle_s`` seconds.
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
    """The request failed as a whole: ``code`` names the class of the error."""

    code: Text
    text: str
    retry_after_s: float | None = None


class Tie(_Message, frozen=True, tag=5):
    """A UCX connection is on its way."""


class Tied(_Message, frozen=True, tag=6):
    """It is there."""


class SlotRows(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one slot: ``first`` to ``first + count``, or those in ``rows``; ``fields``: which of the field lists."""

    slot: Number
    generation: Number
    fields: Count
    first: Count
    count: Count
    rows: Annotated[list[Count], msgspec.Meta(max_length=MOST_PICKED)] | None = None

    @property
    def index(self) -> range | list[int]:
        """The rows."""
        return range(self.first, self.first + self.count) if self.rows is None else self.rows


class Read(_Message, frozen=True, tag=7):
    """Read rows of slots; payload comes in messages tagged ``tag``, ``tag + 1``, ..."""

    fields: FieldLists
    refs: Annotated[list[SlotRows], msgspec.Meta(max_length=MOST_REFS)]
    tag: Number
    epoch: Number


class PartHead(msgspec.Struct, array_like=True, frozen=True):
    """One payload of a reply.

    ``refs`` are positions in the request, ``nbytes`` the data bytes of each, ``size`` is the length of the payload.
    """

    refs: list[Count]
    nbytes: list[Count]
    schema: Number
    size: Count
    rows: Count
    checksums: list[Number] | None = None


class Rows(_Message, frozen=True, tag=8):
    """Answer to Read: what comes, and (position, code, text, retry_after_s) of what does not."""

    parts: list[PartHead]
    errors: list[tuple[Count, str, str, float | None]]
    inline: bytes | None = None


class Reserve(_Message, frozen=True, tag=9):
    """Reserve slots; ``lane``: the client will copy into them itself; it may wait ``wait_s`` for space."""

    op_id: Text
    fields: Fields
    sizes: Annotated[list[Count], msgspec.Meta(max_length=MOST_ROWS)]
    first_row: Count
    ttl_s: Seconds
    wait_s: Seconds
    lane: bool
    epoch: Number


class Granted(_Message, frozen=True, tag=10):
    """Answer to Reserve: (slot, generation, rows, first row) each, and whether the client may copy itself."""

    grants: list[tuple[Number, Number, Count, Count]]
    lane: bool


class Write(_Message, frozen=True, tag=11):
    """Write payloads, (slot, generation, length) each, into reserved slots."""

    op_id: Text
    slots: Annotated[list[tuple[Number, Number, Count]], msgspec.Meta(max_length=MOST_SLOTS)]
    epoch: Number
    checksums: Annotated[list[Number], msgspec.Meta(max_length=MOST_SLOTS)] | None = None
    inline: bytes | None = None


class Ready(_Message, frozen=True, tag=12):
    """Answer to Write: send the payloads, joined and cut as by ``chunks``, tagged ``tag``, ``tag + 1``, ...

    The first ``AHEAD`` messages at once, each further one after a More: the host drops what it does not await yet.
    """

    tag: Number


class More(_Message, frozen=True, tag=19):
    """One more message of a write is awaited."""


class Written(_Message, frozen=True, tag=13):
    """The payloads are there, and right."""


class Abort(_Message, frozen=True, tag=14):
    """Free what a put reserved; ``idle``: the client, who reserved it, says that it copies nothing of it any more."""

    op_id: Text
    idle: bool


class Drop(_Message, frozen=True, tag=15):
    """Rows are nobody's content any more; where ``fields`` is not empty, only these of their fields."""

    fields: FieldLists
    refs: Annotated[list[SlotRows], msgspec.Meta(max_length=MOST_REFS)]
    epoch: Number


class Done(_Message, frozen=True, tag=16):
    """Answer to Abort (how many slots are still occupied for now) and Drop (how many refs were found)."""

    count: Count


class Ask(_Message, frozen=True, tag=17):
    """What is there?"""


class Told(_Message, frozen=True, tag=18):
    """Answer to Ask."""

    facts: dict[str, int | float | str]


Message = (
    Challenge | Answer | Welcome | Failed | Tie | Tied | Read | Rows | Reserve | Granted | Write | Ready | Written
    | More | Abort | Drop | Done | Ask | Told
)  # fmt: skip
#: A body that is longer than its kind can need is not even decoded; of the others (a Write, which may hold payload, a
#: Reserve, which names each row, and replies) the frame's own limit holds.
_BODY_OF_KIND: Final = {kind.__struct_config__.tag: 2 << 20 for kind in (Read, Drop)} | {
    kind.__struct_config__.tag: 16 << 10 for kind in (Tie, Abort, Ask)
}
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def pack_frame(message: Message) -> bytes:
    """Make a frame of a message."""
    body = msgspec.msgpack.encode(message)
    if len(body) > BODY_BYTES:
        raise WireError(f"a message of {len(body)} bytes is longer than {BODY_BYTES}")
    return _HEAD.pack(MAGIC, _VERSION, b"\0\0\0", len(body)) + body


def unpack_head(head: bytes | bytearray, most: int) -> int:
    """Return the length of the body that follows.

    Raises:
        WireError: It is no head of a frame, or the body would be longer than ``most``.
    """
    magic, version, spare, length = _HEAD.unpack(head)
    if magic == MAGIC and version != _VERSION and spare == b"\0\0\0":
        raise WireError(f"it speaks version {version} of the wire, this asyncdp version {_VERSION}: use one release")
    if magic != MAGIC or version != _VERSION or spare != b"\0\0\0":
        raise WireError(f"no frame of asyncdp: {bytes(head)!r}")
    if length > most:
        raise WireError(f"a frame of {length} bytes, {most} are allowed")
    return int(length)


def unpack_body(body: bytes | bytearray | memoryview) -> Message:
    """Return the message in a body.

    Raises:
        WireError: It is none.
    """
    if len(body) > GREETING_BYTES and len(body) > _BODY_OF_KIND.get(body[1], BODY_BYTES):
        raise WireError(f"a message of {len(body)} bytes, longer than any of kind {body[1]}")
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as err:
        raise WireError(f"no message: {err}") from err
