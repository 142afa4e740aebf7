"""What a reader would not take is refused at put: nothing that is acknowledged turns out to be unreadable later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.rows.block import Block
from asyncdp.transports.ucxx.payload.layout import MAX_HEAD_BYTES, read_layout

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import EmbeddedServer

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")

from asyncdp.transports.ucxx.payload.blocks import layout_of, packed
from asyncdp.transports.ucxx.payload.objects import MsgpackCodec
from asyncdp.transports.ucxx.payload.payload import Payload


def of_columns(count: int, name: int) -> Block:
    """One row of so many fields, whose names have so many letters."""
    one = torch.ones(1)
    return Block.from_fields({f"{at:05d}".ljust(name, "n"): one for at in range(count)}, 1)


def test_more_fields_than_a_payload_describes_are_refused_at_put() -> None:
    """The reader bounds the description of fields; the writer knows that bound, and just below it all is well."""
    fitting = of_columns(1000, 1000)
    assert MAX_HEAD_BYTES // 2 < len(layout_of(fitting).schema) <= MAX_HEAD_BYTES
    assert Payload.read(packed(fitting), 1).layout.n == 1
    with pytest.raises(DataPlaneBadRequest, match="1100 fields"):
        layout_of(of_columns(1100, 1000))


@pytest.mark.parametrize("shape", [(1, 0, 1 << 41), (1, 1 << 41, 0)], ids=str)
def test_a_shape_that_no_reader_takes_is_refused_at_put(shape: tuple[int, ...]) -> None:
    """Tensors without bytes may have any shape; a size that the reader takes for nonsense is refused by name."""
    block = Block.from_fields({"z": torch.empty(shape)}, 1)
    with pytest.raises(DataPlaneBadRequest, match="'z'"):
        layout_of(block)
    small = Block.from_fields({"z": torch.empty(1, 0, 1 << 20)}, 1)
    assert read_layout(packed(small), 1).metas[0].shape == (0, 1 << 20)


def test_ragged_rows_without_bytes_are_as_long_as_a_reader_takes() -> None:
    """Their lengths cost nothing, so the reader bounds them, and the writer says so at put."""
    for steps, good in ((1 << 20, True), (1 << 26, False)):
        rows = torch.nested.nested_tensor([torch.empty(steps, 0), torch.empty(1, 0)], layout=torch.jagged)
        block = Block.from_fields({"r": rows}, 2)
        if good:
            assert Payload.read(packed(block), 2).layout.n == 2
        else:
            with pytest.raises(DataPlaneBadRequest, match="'r'"):
                layout_of(block)


@pytest.mark.parametrize("value", [np.str_(""), np.bytes_(b"")], ids=repr)
def test_an_empty_text_of_numpy_comes_back(value: np.generic) -> None:
    """Its dtype has no bytes."""
    codec = MsgpackCodec()
    back = codec.loads(codec.dumps([value]))[0]
    assert type(back) is type(value)
    assert back == value


@pytest.mark.anyio
async def test_a_field_name_that_is_no_utf_8_is_refused_before_anything_is_sent(server: EmbeddedServer) -> None:
    """Payloads and frames are UTF-8; an id may hold lone surrogates, a field's name may not, and is named."""
    from asyncdp import stack
    from asyncdp.calls import CallContext
    from asyncdp.calls.slots import HostRef, Reserve
    from asyncdp.testing.contract.rig import BASE
    from asyncdp.transports.ucxx import UCXXTransport

    config = {**BASE, "impl": "ucxx", "backend": "valkey", "controller_address": server.url}
    transport = UCXXTransport(config)
    async with stack(transport) as client:
        env = client.env
        context = CallContext(env, env.next_op_id(), env.clock.now() + 5, "put_samples")
        with pytest.raises(DataPlaneBadRequest, match="lone surrogates") as caught:
            await transport.execute(Reserve(HostRef("h", 1, (1,)), ("x", "\udc80"), (1,)), context)
        assert caught.value.field == "\udc80"
