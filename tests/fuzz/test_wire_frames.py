"""Frames on the control stream, and the door: a message or a WireError, nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncdp.errors import DataPlaneError
from asyncdp.transports.ucxx.slots.writer_process import this_machine, this_process
from asyncdp.transports.ucxx.wire.control import Control
from asyncdp.transports.ucxx.wire.failures import printable, restore
from asyncdp.transports.ucxx.wire.handshake import Secret, authenticate, greet
from asyncdp.transports.ucxx.wire.messages import (
    BODY_BYTES,
    GREETING_BYTES,
    HEAD_BYTES,
    Answer,
    Challenge,
    Failed,
    Message,
    Welcome,
    WireError,
    pack_frame,
    unpack_body,
    unpack_head,
)
from tests.fuzz.memory_limit import little_memory
from tests.fuzz.peers import line
from tests.fuzz.scale import examples
from tests.fuzz.strategies import damaged, values_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = Secret("a secret for tests")
MESSAGES = st.one_of(*map(values_of, get_args(Message)))
FRAMES = MESSAGES.map(pack_frame)


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    with little_memory():
        yield


# --- frames


def parsed(data: bytes, most: int = BODY_BYTES) -> Message:
    """Parse one frame."""
    size = unpack_head(data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), most)
    return unpack_body(data[HEAD_BYTES : HEAD_BYTES + size])


@settings(max_examples=examples(300))
@given(st.binary(max_size=200) | damaged(FRAMES))
@example(b"ADPW\x01\0\0\0\xff\xff\xff\xff")
def test_a_frame_is_a_message_or_a_wire_error(data: bytes) -> None:
    """Any bytes, and frames that were right: a message that packs to itself, or WireError."""
    try:
        message = parsed(data)
    except WireError:
        return
    assert pack_frame(unpack_body(pack_frame(message)[HEAD_BYTES:])) == pack_frame(message)


@settings(max_examples=examples(150))
@given(MESSAGES)
def test_a_message_travels_unchanged(message: Message) -> None:
    """Every message of every kind comes out of its frame as it was put in."""
    twin = parsed(pack_frame(message))
    assert type(twin) is type(message)
    assert pack_frame(twin) == pack_frame(message)


@settings(max_examples=examples(150))
@given(
    frames=st.lists(FRAMES | damaged(FRAMES) | st.binary(max_size=40), max_size=6),
    data=st.data(),
    known=st.booleans(),
)
def test_a_stream_is_cut_into_messages_however_it_arrives(
    frames: list[bytes], data: st.DataObject, *, known: bool
) -> None:
    """In pieces of any size: the messages up to the first wrong byte, in order, and then the stream is ended.

    Never is more kept than one frame may have.
    """
    stream = b"".join(frames)
    wanted, at, most = [], 0, BODY_BYTES if known else GREETING_BYTES
    ends = False
    while at + HEAD_BYTES <= len(stream):
        try:
            size = unpack_head(stream[at : at + HEAD_BYTES], most)
            if at + HEAD_BYTES + size > len(stream):
                break
            wanted.append(unpack_body(stream[at + HEAD_BYTES : at + HEAD_BYTES + size]))
        except WireError:
            ends = True
            break
        at += HEAD_BYTES + size

    async def receive() -> list[Message]:
        control = Control()
        wire = line(control)
        if known:
            control.open_up()
        got: list[Message] = []
        left = stream
        while left and not control.lost:
            cut = data.draw(st.integers(1, len(left)))
            control.data_received(left[:cut])
            left = left[cut:]
            assert len(control._buffer) <= HEAD_BYTES + most + cut
            while control._whole:
                try:
                    got.append(await control.receive())
                except ConnectionResetError:
                    break
        assert control.lost == ends
        assert wire.ended == ends
        return got

    got = asyncio.run(receive())
    assert [pack_frame(message) for message in got] == [pack_frame(message) for message in wanted]


@settings(max_examples=examples(100))
@given(st.text(max_size=30), st.text(max_size=30), st.none() | st.floats())
def test_a_failure_of_any_name_is_an_error_of_the_plane(code: str, text: str, retry_after_s: float | None) -> None:
    """What a host says went wrong is typed here, whatever it calls it."""
    err = restore(code, text, retry_after_s, host="h", port=1)
    assert isinstance(err, DataPlaneError)
    assert err.message == printable(text)


# --- the door


def close_to(nonce: st.SearchStrategy[bytes]) -> st.SearchStrategy[Any]:
    """Messages of the handshake, and any other."""
    return st.one_of(
        values_of(Challenge, nonce=nonce),
        values_of(Answer, nonce=nonce),
        values_of(Welcome),
        values_of(Failed),
        MESSAGES,
    )


@settings(max_examples=examples(80))
@given(
    messages=st.lists(close_to(st.binary(min_size=16, max_size=64)), max_size=3),
    noise=st.binary(max_size=30),
    client=st.booleans(),
)
def test_nobody_gets_in_without_the_secret(messages: list[Message], noise: bytes, *, client: bool) -> None:
    """Whatever is said at the door, on either side of it: a typed end, nobody is let in, nobody waits for ever."""

    async def meet() -> None:
        control = Control()
        wire = line(control)
        machine, process = this_machine(), this_process()
        welcome = Welcome(b"\0" * 32, "h", 1, "", "", 0, b"\0" * 16, 1.0, 0)
        work = authenticate(control, SECRET, machine, process) if client else greet(control, SECRET, lambda: welcome)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        for message in messages:
            if not control.lost:
                control.data_received(pack_frame(message))
        if noise and not control.lost:
            control.data_received(noise)
        wire.hang_up()
        async with asyncio.timeout(60):
            with pytest.raises((DataPlaneError, WireError, ConnectionResetError)):
                await task
        assert control.most == GREETING_BYTES

    asyncio.run(meet())
