import contextlib
import struct
import warnings
import zlib
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from asyncdp.errors import CorruptPayload, DataPlaneReadError
from asyncdp.rows.block import PICKLE, Block, Column, Objects, Ragged
from asyncdp.transports.ucxx.payload import gather as payload_gather
from asyncdp.transports.ucxx.payload import payload as payload_module
from asyncdp.transports.ucxx.payload.blocks import block_of, layout_of, pack, packed
from asyncdp.transports.ucxx.payload.gather import Selection, gathers
from asyncdp.transports.ucxx.payload.layout import ITEM_BYTES, bound
from asyncdp.transports.ucxx.payload.payload import Payload


def nested(*lengths: int, rest: tuple[int, ...] = ()) -> torch.Tensor:
    """Rows of these lengths."""
    return torch.nested.nested_tensor([torch.randn(k, *rest) for k in lengths], layout=torch.jagged)


def blocks() -> dict[str, Block]:
    """Rows of every kind, and inputs that lie strangely in memory."""
    base = torch.arange(48, dtype=torch.float32).reshape(4, 12)
    frozen = np.arange(8, dtype=np.int64).reshape(4, 2)
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_only = torch.from_numpy(frozen)
    leaves: dict[str, Any] = {
        "strided": base[:, ::3],
        "transposed": base.T.reshape(4, 12).T.T,
        "expanded": torch.tensor([[1.5]]).expand(4, 3),
        "turned": base.reshape(4, 3, 4).transpose(1, 2),
        "read_only": read_only,
        "with_grad": torch.randn(4, 2, requires_grad=True),
        "flat": torch.arange(4),
        "column": torch.arange(4).reshape(4, 1),
        "nothing": torch.zeros(4, 0),
        "ragged": nested(1, 5, 0, 2),
        "ragged_rest": nested(3, 0, 0, 2, rest=(2, 3)),
        "all_empty": nested(0, 0, 0, 0),
        "words": NonTensorStack(*["a", "a", "Zürich", ""]),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.uint16, torch.complex64):
        leaves[str(dtype)] = torch.randint(0, 2, (4, 3)).to(dtype)
    out = {name: Block.from_fields({name: leaf}, 4) for name, leaf in leaves.items()}
    out["all"] = Block.from_fields(leaves, 4)
    out["no_rows"] = Block.from_fields({"a": torch.zeros(0, 3), "b": torch.zeros(0, dtype=torch.bool)}, 0)
    out["no_columns"] = Block(3, {})
    return out


BLOCKS = blocks()


def content(column: Column) -> tuple[Any, ...]:
    """All that a column holds, comparable; that rows of one shape were put as nested ones is their spec's to tell."""
    if isinstance(column, Objects):
        return tuple(column.items)
    values: torch.Tensor = column.values  # type: ignore[attr-defined]
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
    ragged = (column.offsets.tolist(), column.dim, column.nested) if isinstance(column, Ragged) else None
    return values.dtype, tuple(values.shape), raw, ragged


def same(a: Block, b: Block) -> bool:
    """Equal to the last bit."""
    return a.n == b.n and {f: content(c) for f, c in a.columns.items()} == {f: content(c) for f, c in b.columns.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_comes_back_as_it_was(name: str) -> None:
    """Every dtype, shape, strided and empty input: the bytes hold the contiguous copy."""
    block = BLOCKS[name]
    data = packed(block)
    back = Payload.read(data, block.n)
    assert same(block_of(back), block)
    assert back.schema() == block.schema_hash()
    assert back.row_bytes().tolist() == block.row_nbytes().tolist()
    assert back.checksum() == block.checksum(range(block.n))
    assert len(data) <= bound(tuple(block.columns), block.row_nbytes().tolist())


def test_large_tensors_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is larger than the piece, so the loop can breathe between; strided rows too."""
    monkeypatch.setattr(payload_module, "PIECE_BYTES", 100)
    block = Block(40, {"a": Block.from_fields({"a": torch.randn(40, 8)}, 40).columns["a"]})
    strided = Block.from_fields({"a": torch.randn(8, 40).T}, 40)
    for each in (block, strided):
        layout = layout_of(each)
        out = np.empty(layout.nbytes, np.uint8)
        sizes = list(pack(each, layout, out))
        assert max(sizes) <= 100
        assert sum(sizes) == each.nbytes
        assert same(block_of(Payload.read(out)), each)


def test_seeing_a_payload_copies_nothing() -> None:
    """Tensors of the block share the payload's memory."""
    data = packed(BLOCKS["strided"])
    block = block_of(Payload.read(data))
    data[-64:] = 0
    values: torch.Tensor = block.columns["strided"].values  # type: ignore[attr-defined]
    assert values[-1].eq(0).all()


def rows_of(n: int) -> st.SearchStrategy[Any]:
    """Some rows, as a range or a list."""
    some = st.lists(st.integers(0, n - 1), min_size=1, max_size=6)
    spans = st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(lambda s: range(s[0], min(n, s[0] + s[1])))
    return some | spans


@given(
    st.lists(rows_of(4), min_size=1, max_size=5),
    st.sampled_from(["all", "ragged", "strided", "words"]),
    st.sampled_from([0, 2048]),
)
def test_rows_of_many_slots_become_one_payload(picks: list[Any], name: str, pick_bytes: int) -> None:
    """Any rows of any slots, in the order asked, with their sizes per slot and the host's checksum."""
    with mock.patch.object(payload_gather, "_PICK_BYTES", pick_bytes):
        check_gather(picks, name)


def check_gather(picks: list[Any], name: str) -> None:
    """Gather rows, and compare them with what a block gives."""
    block = BLOCKS[name]
    source = Payload.read(packed(block))
    fields = tuple(reversed(block.columns))
    made, errors = gathers([Selection(at, source, fields, rows) for at, rows in enumerate(picks)])
    assert not errors
    (gather,) = made
    out = np.full(gather.layout.nbytes, 0xEE, np.uint8)
    for _ in gather.fill(out):
        pass
    for size in (1, 7, 64, 1 << 20):
        messages = [
            piece.copy() for piece in gather.messages(size, lambda n: np.empty(n, np.uint8), 5) if piece is not None
        ]
        assert all(len(message) == size for message in messages[:-1])
        assert np.concatenate(messages).tobytes() == out.tobytes()
    whole = Payload.read(out, sum(map(len, picks)))
    expected = block.take([row for rows in picks for row in rows], fields)
    assert same(block_of(whole), expected)
    first = 0
    for size, rows in zip(gather.nbytes, picks, strict=True):
        assert size == int(expected.row_nbytes()[first : first + len(rows)].sum())
        assert whole.checksum(first, first + len(rows)) == expected.checksum(range(first, first + len(rows)))
        first += len(rows)


def test_rows_that_follow_one_another_are_copied_together() -> None:
    """Two copies for five rows that lie in two runs, dense and ragged."""
    ragged = torch.nested.nested_tensor([torch.ones(3000, dtype=torch.uint8)] * 8, layout=torch.jagged)
    for leaf in (torch.ones(8, 3000, dtype=torch.uint8), ragged):
        source = Payload.read(packed(Block.from_fields({"a": leaf}, 8)))
        (made,), _ = gathers([Selection(0, source, ("a",), [0, 1, 2, 5, 6])])
        assert sum(made.fill(np.empty(made.layout.nbytes, np.uint8))) == 9000 + 8192


def test_slots_of_other_shapes_get_a_payload_of_their_own() -> None:
    """A field put dense twice with other lengths: two payloads, and the reader joins them."""
    sources = [Payload.read(packed(Block.from_fields({"a": torch.ones(2, k)}, 2))) for k in (3, 4, 3)]
    made, _ = gathers([Selection(at, source, ("a",), range(2)) for at, source in enumerate(sources)])
    assert [[pick.ref for pick in gather.picks] for gather in made] == [[0, 2], [1]]


def test_a_lacking_field_or_row_is_an_error_of_that_slot_alone() -> None:
    """Others are served."""
    source = Payload.read(packed(BLOCKS["ragged"]))
    asked = [("ragged", range(4)), ("other", range(4)), ("ragged", [4]), ("ragged", [-1])]
    made, errors = gathers([Selection(at, source, (name,), rows) for at, (name, rows) in enumerate(asked)])
    assert sorted(errors) == [1, 2, 3]
    assert [pick.ref for pick in made[0].picks] == [0]


GOOD = packed(BLOCKS["all"]).tobytes()


@given(st.binary(max_size=300))
@example(GOOD[:40])
@example(b"ADPP\x01\x00\x00\x00\xff\xff\xff\xff" + b"\xff" * 20)
@example(b"ADPP\x01\x00\x00\x00\x00\x00\x00\x00" + b"\xff" * 20)
def test_garbage_is_corrupt_never_a_crash(data: bytes) -> None:
    """Any bytes are a payload or CorruptPayload, before anything is allocated by them."""
    with contextlib.suppress(CorruptPayload):
        block_of(Payload.read(np.frombuffer(data, np.uint8)))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_changed_byte_of_the_head_is_noticed(at: int, byte: int) -> None:
    """The head has a checksum of its own: a changed byte is CorruptPayload, or lies in the data."""
    data = np.frombuffer(GOOD, np.uint8).copy()
    unchanged = data[at] == byte
    data[at] = byte
    head = Payload.read(np.frombuffer(GOOD, np.uint8)).layout.head_bytes
    if at >= head or unchanged:
        assert Payload.read(data).layout.n == 4
    else:
        with pytest.raises(CorruptPayload):
            Payload.read(data)


SIZES = st.integers(-2, 5) | st.just(1 << 39) | st.just(1 << 62)
COLUMNS = st.tuples(
    st.sampled_from(["a", "b"]),
    st.integers(-1, 4),
    st.sampled_from(["float32", "int8", "", "qint8", "nonsense"]),
    st.lists(SIZES, max_size=3),
    st.integers(-1, 3),
    st.booleans(),
)


def forged(columns: list[Any], n: int, lengths: list[int], size: int) -> np.ndarray[Any, Any]:
    """Bytes of a payload that says this of itself, with a right checksum and ``size`` bytes of data."""
    schema = msgspec.msgpack.encode(columns)
    body = schema + bytes(-(32 + len(schema)) % 64) + np.asarray(lengths, np.int64).tobytes()
    body += bytes(-(32 + len(body)) % 64)
    whole = 32 + len(body) + size
    head = struct.pack("<4sBBHIQQI", b"ADPP", 1, 0, 0, len(schema), n % (1 << 64), whole, zlib.crc32(body))
    return np.frombuffer(head + body + bytes(size), np.uint8)


@given(st.lists(COLUMNS, max_size=3), SIZES, st.lists(SIZES, max_size=4), st.integers(0, 400))
def test_nonsense_with_a_right_checksum_is_corrupt(columns: list[Any], n: int, lengths: list[int], size: int) -> None:
    """A writer that computes checksums of nonsense crashes nobody and makes nobody allocate."""
    data = forged(columns, n, lengths, size)
    with contextlib.suppress(CorruptPayload):
        block = block_of(Payload.read(data))
        assert block.nbytes <= size


RAGGED = ["r", 1, "int8", [], 0, False]
DENSE = ["d", 0, "int32", [2], 0, False]


@pytest.mark.parametrize(
    ("columns", "n", "lengths", "size"),
    [
        ([RAGGED], 2, [-1, 3], 64),
        ([RAGGED], 2, [3, -1], 64),
        ([RAGGED], 2, [1 << 62, 1 << 62], 64),
        ([RAGGED], 2, [1, 2], 128),
        ([DENSE], 2, [], 0),
        ([DENSE], 2, [], 128),
        ([DENSE, DENSE], 2, [], 128),
        ([["z", 1, "int8", [0], 0, False]], 1, [1 << 40], 0),
    ],
)
def test_lengths_that_do_not_add_up_are_corrupt(columns: list[Any], n: int, lengths: list[int], size: int) -> None:
    """Negative ones, overflowing ones, more or fewer bytes than the columns need, steps that hold no bytes."""
    assert Payload.read(forged([RAGGED], 2, [1, 2], 64)).layout.n == 2
    with pytest.raises(CorruptPayload):
        Payload.read(forged(columns, n, lengths, size))


def test_a_user_sees_what_was_put() -> None:
    """From a TensorDict to bytes and back to a TensorDict."""
    put = TensorDict({"a": torch.randn(2, 3), "s": NonTensorStack("x", "y")}, batch_size=[2])
    back = block_of(Payload.read(packed(Block.from_fields(put, 2))), PICKLE).to_tensordict()
    assert torch.equal(back["a"], put["a"])
    assert back["s"] == ["x", "y"]


def test_each_dtype_of_torch_is_in_the_table() -> None:
    """A slot host has no torch: what it knows of dtypes is what torch says, but for parts of bytes."""
    offered = {
        name: dtype.itemsize
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype)
        and str(dtype) == f"torch.{name}"
        and not name.startswith(("q", "bits"))
        and name.lstrip("u").removeprefix("int") not in set("1234567")
    }
    assert "float32" in offered
    assert offered == {name: size for name, size in ITEM_BYTES.items() if hasattr(torch, name)}


def test_a_dtype_of_a_newer_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose dtype this process' torch lacks cannot be read here, and are not called corrupt."""
    payload = Payload.read(packed(Block.from_fields({"x": torch.zeros(2, dtype=torch.bfloat16)}, 2)))
    monkeypatch.delattr(torch, "bfloat16")
    with pytest.raises(DataPlaneReadError, match="'x' is of bfloat16, which torch") as raised:
        block_of(payload)
    assert not isinstance(raised.value, CorruptPayload)
    assert raised.value.field == "x"


def test_a_message_within_one_slot_is_not_copied() -> None:
    """Large rows are sent from where they lie; what lies across a border of rows is copied, in bounded steps."""
    sources = [Payload.read(packed(Block.from_fields({"a": torch.randn(1, 1 << 14)}, 1))) for _ in range(3)]
    (gather,), _ = gathers([Selection(at, source, ("a",), range(1)) for at, source in enumerate(sources)])
    taken: list[int] = []

    def take(nbytes: int) -> np.ndarray[Any, Any]:
        taken.append(nbytes)
        return np.empty(nbytes, np.uint8)

    steps = list(gather.messages(8 << 10, take, 1 << 10))
    messages = [step for step in steps if step is not None]
    views = [any(np.shares_memory(message, source.data) for source in sources) for message in messages]
    assert views.count(False) == len(taken) == 3
    assert len(steps) > len(messages)
    assert sum(map(len, messages)) == gather.layout.nbytes
