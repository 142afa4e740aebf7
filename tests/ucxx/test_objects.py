import collections
import contextlib
import enum
import pickle
import tracemalloc
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdp import build_data_plane_client
from asyncdp.calls import GetSamples
from asyncdp.calls.slots import HostRef, Locate, Located, Part, ReadResult, SlotRef
from asyncdp.compose.reads import read_rows
from asyncdp.errors import CorruptPayload, DataPlaneNotReady, PartialReadError
from asyncdp.rows.block import Block
from asyncdp.rows.block import Objects as RowObjects
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.payload import objects
from asyncdp.transports.ucxx.payload.objects import MsgpackCodec

pytest.importorskip("msgpack", reason="needs the extra ucxx (msgpack)")

KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    KEYS | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(KEYS, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:  # noqa: PLR0911 - one line per kind
    """Equal, of the same types at every level, dicts in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return a == b and sorted(map(repr, map(type, a))) == sorted(map(repr, map(type, b)))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return bool(a == b)


@given(VALUES)
@example((1, [2, (3, {4: {(5, "6"): {7}}})]))
@example(1 << 4000)
@example(-(1 << 63) - 1)
@example("\ud800 lone")
@example(-0.0)
def test_values_come_back_as_they_were(value: Any) -> None:
    """Tuples, sets, None, bytes, big ints, dicts with any keys: equal and of the same types."""
    codec = MsgpackCodec()
    assert same(codec.loads(codec.dumps(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        np.zeros((0, 3), np.float32),
        np.float32(1.5),
        np.float64(1.5),
        np.complex128(2),
        np.array(["a", "bcd"]),
        np.datetime64("2020-01-02"),
        np.bool_(1),
        np.array(3.5),
    ],
    ids=repr,
)
def test_numpy_values_come_back_as_they_were(value: Any) -> None:
    """Arrays and scalars keep dtype, shape and values, and are the reader's own."""
    codec = MsgpackCodec()
    back = codec.loads(codec.dumps({"a": [value]}))["a"][0]
    assert same(np.asarray(back), np.asarray(value))
    assert type(back) is type(value)
    if isinstance(back, np.ndarray):
        assert back.flags.writeable


@pytest.mark.parametrize("dtype", sorted(objects._TENSOR_TYPES))
def test_tensors_come_back_as_they_were(dtype: str) -> None:
    """Of every dtype and rank, empty ones, views, conjugates and those with grad; the copy shares no memory."""
    whole = torch.arange(24).view(2, 3, 4).to(getattr(torch, dtype))
    values = [whole, whole[:, 1], whole[0, 0, 0], whole[:0], whole.transpose(0, 2)]
    if whole.is_complex() or whole.dtype in (torch.float32, torch.bfloat16):
        values += [whole.clone().requires_grad_() * 2, whole.conj()]
    codec = MsgpackCodec()
    back = codec.loads(codec.dumps({"log": [tuple(values)]}))["log"][0]
    for found, value in zip(back, values, strict=True):
        assert (found.dtype, found.shape, found.requires_grad) == (value.dtype, value.shape, False)
        plain = value.detach().resolve_conj().contiguous()
        if plain.numel():
            assert torch.equal(found.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))
    assert len(codec.dumps(whole[:1, :1, :1])) < len(codec.dumps(whole))


def test_arrays_of_objects_come_back_as_they_were() -> None:
    """Of any shape, with lists of equal length, bytearrays and arrays in them."""
    codec = MsgpackCodec()
    matrix = np.empty((2, 2), dtype=object)
    matrix[:] = [[[1, 2], bytearray(b"x")], [(3, {4}), np.array([None, [5]], dtype=object)]]
    back = codec.loads(codec.dumps([matrix]))[0]
    assert back.shape == (2, 2)
    assert same(back.ravel().tolist()[:3], matrix.ravel().tolist()[:3])
    assert back[1, 1].tolist() == [None, [5]]
    assert codec.loads(codec.dumps(np.empty((0, 3), dtype=object))).shape == (0, 3)


@pytest.mark.parametrize(
    "parts",
    [
        ["float32", [2], b"1234"],
        ["float32", [-1], b"1234"],
        ["float32", [1.0], b"1234"],
        ["float32", ["1"], b"1234"],
        ["float32", 1, b"1234"],
        ["float32", [0] * 2000, b""],
        ["load", [1], b"1"],
        ["qint8", [1], b"1"],
        ["float32", [1]],
    ],
    ids=lambda parts: repr(parts)[:40],
)
def test_a_tensor_that_is_none_is_corrupt(parts: list[Any]) -> None:
    """What its bytes announce is checked before it is made."""
    codec = MsgpackCodec()
    packb, ext = codec._msgpack.packb, codec._msgpack.ExtType
    with pytest.raises(CorruptPayload):
        codec.loads(packb(ext(objects._TENSOR, packb(parts))))


def test_many_small_tensors_are_refused() -> None:
    """An empty tensor takes 40 times the memory of its bytes: more than a few thousand are refused on both sides."""
    codec = MsgpackCodec()
    with pytest.raises(ValueError, match="so many small ones"):
        codec.dumps([torch.zeros(0)] * 20_000)
    packb, ext = codec._msgpack.packb, codec._msgpack.ExtType
    with pytest.raises(CorruptPayload, match="so many small ones"):
        codec.loads(packb([ext(objects._TENSOR, packb(["float32", [0], b""]))] * 60_000))


class Colour(enum.IntEnum):
    """A subclass of int."""

    RED = 1


class Point(NamedTuple):
    """A subclass of tuple."""

    x: int
    y: int


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1),
        Colour.RED,
        Point(1, 2),
        object(),
        memoryview(b"x"),
        {"deep": [np.array([object()])]},
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged),
        range(3),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_kept_is_refused(value: Any) -> None:
    """A subclass would come back as its base: it is refused, and the message says what it is."""
    with pytest.raises((TypeError, ValueError), match="cannot be kept unchanged"):
        MsgpackCodec().dumps(value)


def test_cycles_and_great_depth_are_refused() -> None:
    """No endless loop, no crash."""
    loop: list[Any] = []
    loop.append((loop,))
    deep: Any = ()
    for _ in range(5000):
        deep = (deep,)
    for value in (loop, deep):
        with pytest.raises(ValueError, match="levels deep"):
            MsgpackCodec().dumps(value)


def test_pickle_only_where_it_was_turned_on() -> None:
    """A pickle from the wire is not loaded unless the user said so."""
    trusting = MsgpackCodec(allow_pickle=True)
    data = trusting.dumps({"c": Colour.RED})
    assert trusting.loads(data) == {"c": Colour.RED}
    assert type(trusting.loads(data)["c"]) is Colour
    with pytest.raises(CorruptPayload, match="allow_pickle is off") as caught:
        MsgpackCodec().loads(data)
    assert not caught.value.retryable


@pytest.mark.anyio
@pytest.mark.parametrize("lost", [False, True])
async def test_a_pickle_that_is_not_loaded_does_not_fail_the_other_rows(*, lost: bool) -> None:
    """The error of its row, by field; also where other rows did not come for another reason."""
    trusting, codec = MsgpackCodec(allow_pickle=True), MsgpackCodec()
    block = Block(3, {"x": RowObjects([trusting.dumps(value) for value in ("one", Colour.RED, {"three": 3})])})
    host = HostRef("h", 1, (1,))
    refs = (SlotRef(host, 0, 1, ("x",), range(3), range(3)), SlotRef(host, 1, 1, ("x",), range(1), range(3, 4)))
    refs = refs[: 1 + lost]

    async def send(call: Any, _: Any) -> Any:
        if isinstance(call, Locate):
            return Located(refs, {}, (None,) * (3 + lost), {})
        errors = {1: DataPlaneNotReady("full")} if lost else {}
        return ReadResult((Part((0,), block, (block.nbytes,), block.schema_hash()),), errors)

    context: Any = SimpleNamespace(env=SimpleNamespace(codec=codec), verb="get_samples")
    call = GetSamples(("a", "b", "c", "d")[: 3 + lost], "p", ("x",))
    with pytest.raises(PartialReadError) as caught:
        await read_rows(send, call, context)
    told = caught.value
    assert told.ok.sample_ids == ["a", "c"]
    assert [same(told.rows[at]["x"], value) for at, value in enumerate(("one", {"three": 3}))] == [True, True]
    kinds = {1: CorruptPayload, 3: DataPlaneNotReady} if lost else {1: CorruptPayload}
    assert {row: type(err) for row, err in told.errors.items()} == kinds
    assert told.errors[1].field == "x"
    assert "allow_pickle" in told.errors[1].message


def test_each_reader_says_itself_whether_pickles_are_loaded() -> None:
    """What a writer attaches others with turns nothing on; a pickled client, whose maker's code has run, keeps it."""
    pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
    config = {"enabled": True, "impl": "ucxx", "controller_address": "redis://127.0.0.1:1"}
    client = build_data_plane_client({**config, "ucxx": {"allow_pickle": True, "namespace": "n"}}, bootstrap=False)
    told = client.attach_config()
    assert told["ucxx"] == {"namespace": "n"}
    data = client.env.codec.dumps(Colour.RED)
    again = pickle.loads(pickle.dumps(client))
    assert again.env.codec.loads(data) is Colour.RED
    assert pickle.loads(pickle.dumps(again)).env.codec.loads(data) is Colour.RED
    transport = pickle.loads(pickle.dumps(UCXXTransport({**config, "ucxx": {"allow_pickle": True}}, bootstrap=False)))
    assert transport.object_codec.loads(data) is Colour.RED
    attached = build_data_plane_client(told, bootstrap=False)
    with pytest.raises(CorruptPayload, match="own config"):
        attached.env.codec.loads(data)
    with pytest.raises(TypeError, match="cannot be kept"):
        attached.env.codec.dumps(Colour.RED)


@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc7\x05\x64" + pickle.dumps(None, 2))
@example(b"\xc7\x00\x05")
@example(b"\xc7\x01\x07\xc0")
def test_garbage_is_an_error_never_a_crash(data: bytes) -> None:
    """Any bytes decode to a value or raise CorruptPayload."""
    with contextlib.suppress(CorruptPayload):
        MsgpackCodec().loads(data)


@pytest.mark.parametrize(
    "value",
    [
        {number * ((1 << 61) - 1) for number in range(1, 3000)},
        frozenset(number * ((1 << 61) - 1) for number in range(1, 3000)),
        {number * ((1 << 61) - 1): None for number in range(1, 3000)},
        {"within": [{(number * ((1 << 61) - 1), 0): 1 for number in range(1, 3000)}]},
    ],
    ids=["set", "frozenset", "keys", "tuples as keys, within"],
)
def test_members_of_one_hash_are_refused_before_they_are_compared(value: Any) -> None:
    """A value made for the purpose costs its reader no more than its bytes; a large honest one is kept.

    Who puts it is told so.
    """
    codec = MsgpackCodec()
    with pytest.raises(ValueError, match="one hash"):
        codec.dumps(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_apart", lambda _: None)
        packed = codec.dumps(value)
    with pytest.raises(CorruptPayload, match="one hash"):
        codec.loads(packed)
    honest = {"set": set(range(5000)), "dict": {str(number): number for number in range(5000)}}
    assert codec.loads(codec.dumps(honest)) == honest


@pytest.mark.parametrize("dtype", ["<U1", ">U1", "<U3"])
def test_text_of_impossible_code_points_is_corrupt(dtype: str) -> None:
    """Else numpy raises SystemError when the element is looked at, in the consumer's own code."""
    codec = MsgpackCodec()
    good = np.array(["\U0010ffff"], dtype)
    assert codec.loads(codec.dumps(good)).tolist() == good.tolist()
    for value in (good, good[0]):
        packed = codec.dumps(value)
        last = (0x10FFFF).to_bytes(4, "little" if value.dtype.byteorder in "<=" else "big")
        assert last in packed
        wrong = (0x110000).to_bytes(4, "little" if value.dtype.byteorder in "<=" else "big")
        with pytest.raises(CorruptPayload, match="code point"):
            codec.loads(packed.replace(last, wrong))


def nested(levels: int, wrap: Any) -> Any:
    """Return a value of so many levels."""
    value: Any = None
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda v: [v],
        lambda v: {"k": v},
        lambda v: [[[v, 1]]] * 1,
        lambda v: [[[[[[[[(v,)]]]]]]]],
        lambda v: [{"k": [(v, 1)]}, 2],
        lambda v: [{(1, frozenset({2})): [v]}],
    ],
    ids=["lists", "dicts", "lists in lists", "few tuples, many lists", "mixed", "beside keys that nest"],
)
def test_depth_is_counted_over_all_that_nests(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 levels are kept; more are refused, by name at put, and as corrupt where somebody sent them all the same."""
    codec = MsgpackCodec()
    deepest = next(levels for levels in range(300) if not kept(codec, nested(levels + 1, wrap)))
    value = nested(deepest, wrap)
    assert codec.loads(codec.dumps(value)) == value
    with pytest.raises(ValueError, match="levels deep"):
        codec.dumps(nested(deepest + 1, wrap))
    monkeypatch.setattr(objects._Nest, "look_at", lambda *_: None)
    monkeypatch.setattr(objects, "_MAX_PASSES", 200)
    packed = codec.dumps(nested(deepest + 1, wrap))
    monkeypatch.undo()
    with pytest.raises(CorruptPayload, match="levels deep"):
        codec.loads(packed)


def kept(codec: MsgpackCodec, value: Any) -> bool:
    """Whether a value can be put."""
    try:
        codec.dumps(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("one", "wrap"),
    [
        ([], list),
        ({}, list),
        ([{}], list),
        (frozenset(), list),
        (set(), lambda many: [*many, "x"]),
        ([], tuple),
        ([], lambda many: {"within": [(many,)]}),
        ([[], [], []], lambda many: dict(enumerate(many))),
    ],
    ids=["lists", "dicts", "dicts in lists", "frozensets", "sets", "in a tuple", "far within", "values of a dict"],
)
def test_many_small_containers_are_refused_before_they_are_made(
    one: Any, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of empty lists would be sixty times as much where they are read: refused at put, and when they come."""
    codec = MsgpackCodec()
    few, many = wrap([one] * 15_000), wrap([one] * 70_000)
    assert len(codec.loads(codec.dumps(few))) == len(few)
    with pytest.raises(ValueError, match="put them as a tensor"):
        codec.dumps(many)
    monkeypatch.setattr(objects, "_check_count", lambda *_: None)
    packed = codec.dumps(many)
    monkeypatch.undo()
    with pytest.raises(CorruptPayload, match="put them as a tensor"):
        codec.loads(packed)


def test_honest_values_of_any_size_are_kept() -> None:
    """Whatever bytes they are made of: long lists of numbers, texts and arrays full of bytes that could be lists."""
    codec = MsgpackCodec()
    values: list[Any] = [
        list(range(200_000)),
        [0x8080 + (number % 100) for number in range(200_000)],
        [float(number) for number in range(150_000)],
        ["w\u00f6rd"] * 200_000,
        "\u0100" * 200_000,
        b"\xdd\x90" * 200_000,
        [b"\xdd" * 300] * 1000,
        {number: -number for number in range(140_000)},
        [{"role": "user", "content": "h\u00e9llo", "n": number} for number in range(70_000)],
        [(number, 2 * number) for number in range(10_000)] + [[1, 2, 3]] * 70_000,
        [None, True, 2**70, -(2**70), 1j, 3 + 4j, "x" * 7000, b"y" * 300, 2**63, -(2**62)] * 200,
        tuple(range(140_000)),
        set(range(140_000)),
        bytearray(200_000),
    ]
    for value in values:
        again = codec.loads(codec.dumps(value))
        assert type(again) is type(value)
        assert again == value
    array = np.arange(200_000).astype("u1")
    assert np.array_equal(codec.loads(codec.dumps([array, 1]))[0], array)


def test_what_lists_say_of_their_length_is_not_believed() -> None:
    """A thousand lists, each said to hold all of the value: memory is not taken for them."""
    for head, size in ((b"\xdd", 4), (b"\xdf", 4), (b"\xdc", 2)):
        n = min(1 << (8 * size), 200_000) - 1
        with pytest.raises(CorruptPayload, match="items in" if size == 4 else "decoded"):
            MsgpackCodec().loads((head + n.to_bytes(size, "big")) * 1000 + b"\0" * 200_000)


@given(st.binary(max_size=200))
@example(b"\xdd\x00\x00\x00\x01\xc0")
@example(b"\xcd\x00")
@example(b"\xc1")
@example(b"\xc6\xff\xff\xff\xff")
def test_the_survey_refuses_nothing_that_can_be_read(data: bytes) -> None:
    """It walks over the same bytes as msgpack does; whatever they are, it ends."""
    codec = MsgpackCodec()
    try:
        value = codec._unpack(data, 0, None)
    except Exception:  # noqa: BLE001 - garbage
        value = codec
    try:
        again = codec._unpack(data, 0, objects._Survey(len(data)))
    except Exception:  # noqa: BLE001
        again = codec
    assert repr(again) == repr(value)


def test_a_long_list_of_numbers_is_not_surveyed_number_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no bytes could begin too many lists, what lists say is not added up: that takes three times as long."""
    monkeypatch.setattr(objects._Survey, "add", lambda *_: 1 / 0)
    codec = MsgpackCodec()
    for value in ([at % 100 for at in range(200_000)], (7,) * 140_000, [0.5] * 150_000, ["text"] * 140_000):
        assert codec.loads(codec.dumps(value)) == value


@given(st.binary(max_size=200), st.integers(0, 8))
@example(b"\xd4\x02\x90" * 20, 8)
@example(b"\xc7\x01\x03\x90" * 20, 8)
@example(b"\xd4\x0a\x90" * 20, 8)
@example(b"\xdd\0\0\0\x64" * 3 + b"\0" * 90, 2)
def test_what_is_not_surveyed_would_pass_the_survey(data: bytes, free: int) -> None:
    """The cheap bound lets nothing through that the survey refuses: containers, sets, the lengths of long lists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_FREE", free)
        patch.setattr(objects, "_LONG", 0)
        patch.setattr(objects, "_MOST_ANNOUNCED", 0)
        if objects._surely_within(data, objects._heads(data)):
            why = ""
            try:
                MsgpackCodec()._unpack(data, 0, objects._Survey(len(data)), len(data))
            except Exception as err:  # noqa: BLE001 - garbage
                why = str(err)
            assert "lists, dicts, tuples" not in why


def nested_lists(lists: int, announced: int, passes: int) -> bytes:
    """Tuples one in another, each of which holds lists one in another that announce more than they have."""
    body = b"\x90"
    for _ in range(passes):
        body = (b"\xdd" + announced.to_bytes(4, "big")) * lists + body
        body = b"\xc9" + len(body).to_bytes(4, "big") + b"\x01" + body
    return body


@pytest.mark.parametrize("announced", [131_071, 16_000, 300])
def test_short_lists_that_announce_much_are_not_believed(announced: int) -> None:
    """Many lists below the length that is surveyed: 60 x 500 of them took 2 GB for 150 KB."""
    data = nested_lists(500, announced, 60)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPayload):
            MsgpackCodec().loads(data)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["(1," * 50_000 + ")i4", "i4," * 100_000, "{'a': 'i4'}", "<f4 ", "f4\n", "<U99999999999"]
)
def test_what_is_no_text_of_a_dtype_is_not_given_to_numpy(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would evaluate tuples and lists of fields: 2 MB took 948 MB and 8 s."""
    monkeypatch.setattr(objects.np, "dtype", lambda _: 1 / 0)
    with pytest.raises(ValueError, match="is not kept"):
        objects._plain(text)


@pytest.mark.parametrize(
    "kind",
    ["?", "i1", "<i8", ">u2", "<f2", "f4", "c16", "S3", "U2", "M8[ns]", "m8[25us]", "M8", "m8", "S0", "U0", "<M8[Y]"],
)
def test_every_dtype_that_is_kept_has_such_a_text(kind: str) -> None:
    """As numpy itself writes it."""
    array = np.zeros(2, kind)
    codec = MsgpackCodec()
    got = codec.loads(codec.dumps(array))
    assert (got.dtype, got.tolist()) == (array.dtype, array.tolist())


MODULUS = (1 << 61) - 1


def alike(levels: int, width: int) -> frozenset[Any]:
    """Sets within sets, all members of each of one hash."""
    members: list[Any] = [7 + at * MODULUS for at in range(width)]
    for _ in range(levels):
        members = [frozenset(members[:at] + members[at + 1 :]) for at in range(len(members))]
    return frozenset(members)


@pytest.mark.timeout(120)
def test_sets_of_sets_of_one_hash_are_refused() -> None:
    """Each level multiplies the comparisons: 679 KB took 17 s. Neither end makes one."""
    codec = MsgpackCodec()
    with pytest.raises(ValueError, match="one hash"):
        codec.dumps({frozenset({frozenset({-1}), 5}), frozenset({frozenset({-2}), 5})})
    raw = codec._msgpack.packb
    member = [codec._msgpack.ExtType(4, (7 + at * MODULUS).to_bytes(16, "little", signed=True)) for at in range(4)]
    for _ in range(7):
        member = [codec._msgpack.ExtType(3, raw(member[:at] + member[at + 1 :])) for at in range(4)]
    with pytest.raises(CorruptPayload, match="one hash"):
        codec.loads(raw(codec._msgpack.ExtType(3, raw(member))))


def test_few_members_of_one_hash_are_kept() -> None:
    """hash(-1) is hash(-2), so such members come in honest values."""
    codec = MsgpackCodec()
    corners = {(x, y, z) for x in (-1, -2) for y in (-1, -2) for z in (-1, -2)}
    for value in (corners, {frozenset({-1}), frozenset({-2})}, {(-1, "a"): 1, (-2, "a"): 2}, {-1, -2}):
        assert codec.loads(codec.dumps(value)) == value


def test_large_tuples_of_one_hash_are_refused() -> None:
    """64 tuples that differ at the end only: 6.4 MB took 2.4 s."""
    value = {
        (*range(10_000), -1 if at & 1 else -2, *[-1 if at >> bit & 1 else -2 for bit in range(6)]) for at in range(64)
    }
    with pytest.raises(ValueError, match="too large to be compared"):
        MsgpackCodec().dumps(value)
