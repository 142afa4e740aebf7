import asyncio
from typing import Any

import pytest
import torch

from asyncdp import (
    Client,
    CorruptPayload,
    DataPlaneClearError,
    DataPlaneError,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    Service,
    StaleSlotError,
    TypedErrors,
)
from asyncdp.calls import Call, CallContext, ClearSamples, Depth, EvictSamples, GetSamples, ListMetadata, PutSamples
from asyncdp.calls.slots import HostRef, Locate, Part, Publish, ReadResult, ReadSlots, SlotRef, TryClaim
from asyncdp.rows.block import Block, Dense
from asyncdp.testing import FaultPlan, run_virtual
from tests.layers.rig import Rig, virtual

HOST = HostRef("h", 1, (1, 2))
REFS = tuple(SlotRef(HOST, slot, 1, ("x",), [0], [slot]) for slot in range(3))
READ = ReadSlots(HOST, REFS, 2)
LOCATE = Locate(("a",), "p", ("x",))
PUBLISH = Publish(("a",), "p", (), None, {})
CLAIM = TryClaim("p", "t", ("x",), 1, 1)


class ClosedByPeer(Exception):
    """Stands for an exception type of a backend's own."""


class Scripted(Service):
    """A transport that raises, or returns, what it was given."""

    error_table = ((ClosedByPeer, DataPlaneUnavailable), ("StrangeTimeout", DataPlaneTimeout))

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Answer."""
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def ask(answer: Any, call: Call[Any], table: Any = ()) -> Any:
    """Send one call through TypedErrors."""
    layer = TypedErrors(Scripted(answer), table=table)

    async def main() -> Any:
        env = Client(layer).env
        return await layer.execute(call, CallContext(env, "op", env.clock.now() + 10, "the_verb"))

    return run_virtual(main)


def error_of(answer: Any, call: Call[Any], table: Any = ()) -> DataPlaneError:
    """Return the error that comes of it."""
    with pytest.raises(DataPlaneError) as caught:
        ask(answer, call, table)
    return caught.value


class StrangeTimeout(Exception):
    """Known to the transport by name only, as where importing it would need an extra."""


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (ConnectionRefusedError("r"), DataPlaneUnavailable),
        (ConnectionResetError("r"), DataPlaneUnavailable),
        (BrokenPipeError("r"), DataPlaneUnavailable),
        (EOFError("r"), DataPlaneUnavailable),
        (FileNotFoundError("r"), DataPlaneUnavailable),
        (OSError(113, "r"), DataPlaneUnavailable),
        (TimeoutError("r"), DataPlaneTimeout),
        (ClosedByPeer("r"), DataPlaneUnavailable),
        (StrangeTimeout("r"), DataPlaneTimeout),
        (ExceptionGroup("g", [ExceptionGroup("g", [ConnectionResetError("r")])]), DataPlaneUnavailable),
    ],
)
def test_raw_exceptions_become_the_planes(raw: Exception, kind: type[DataPlaneError]) -> None:
    """What a backend raises becomes a typed error with its place, its text and the raw exception behind it."""
    err = error_of(raw, READ)
    assert type(err) is kind
    assert (err.op, err.host, err.port) == ("the_verb", "h", 2)
    assert err.retryable
    assert err.blames_port
    assert "r" in err.message
    assert err.cause_text is not None
    assert err.__cause__ is not None


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (READ, DataPlaneReadError),
        (LOCATE, DataPlaneReadError),
        (GetSamples(("a",), "p", ("x",)), DataPlaneReadError),
        (PutSamples(("a",), "p"), DataPlaneWriteError),
        (PUBLISH, DataPlaneWriteError),
        (ClearSamples(("a",), "p"), DataPlaneClearError),
        (EvictSamples(("a",), "p"), DataPlaneClearError),
        (ListMetadata("p"), DataPlaneError),
    ],
)
def test_what_nobody_knows_is_not_retried(call: Call[Any], kind: type[DataPlaneError]) -> None:
    """An exception that no table names becomes the verb's own kind of error and is not retryable."""
    err = error_of(ArithmeticError("odd"), call)
    assert type(err) is kind
    assert not err.retryable
    assert not err.blames_port
    assert "ArithmeticError: odd" in err.message


@pytest.mark.parametrize(
    ("raw", "call", "ambiguous"),
    [
        (ConnectionRefusedError(), PUBLISH, False),
        (FileNotFoundError(), PUBLISH, False),
        (ConnectionResetError(), PUBLISH, True),
        (TimeoutError(), CLAIM, True),
        (RuntimeError(), PUBLISH, True),
        (ConnectionResetError(), READ, False),
        (TimeoutError(), Depth("p"), False),
    ],
)
def test_only_what_may_have_acted_is_ambiguous(raw: Exception, call: Call[Any], *, ambiguous: bool) -> None:
    """A mutation whose answer is missing is ambiguous; one that was never sent, or a read, is not."""
    assert error_of(raw, call).ambiguous is ambiguous


def test_a_users_table_comes_first() -> None:
    """Rows of the layer's own table win over the transport's and the common ones."""
    assert type(error_of(ClosedByPeer(), READ, ((ClosedByPeer, DataPlaneReadError),))) is DataPlaneReadError


def test_the_planes_own_errors_pass() -> None:
    """A typed error goes up as it is, with the place filled in where it was unknown."""
    raised = StaleSlotError("gone", host="elsewhere")
    err = error_of(raised, READ)
    assert err is raised
    assert (err.host, err.op) == ("elsewhere", "the_verb")


@pytest.mark.parametrize("stop", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_program_or_a_task_passes(stop: BaseException) -> None:
    """Cancellation, KeyboardInterrupt and SystemExit are never translated."""
    layer = TypedErrors(Scripted(stop))

    async def main() -> None:
        for call in (READ, PUBLISH):
            with pytest.raises(type(stop)):
                await layer.execute(call, CallContext(Client(layer).env, "op", 10.0, "v"))

    run_virtual(main)


def part(slot: int, value: float = 1.0, rows: int = 1) -> Part:
    """Return the payload of one slot."""
    block = Block(rows, {"x": Dense(torch.full((rows, 2), value))})
    return Part((slot,), block, (block.nbytes,), block.schema_hash(), (block.checksum(range(rows)),))


def test_raw_errors_inside_results_are_translated() -> None:
    """An error of a single slot travels as a value and is typed like one that was raised."""
    result: ReadResult = ask(ReadResult((part(0), part(1)), {2: ConnectionResetError("x")}), READ)  # type: ignore[dict-item]
    assert type(result.errors[2]) is DataPlaneUnavailable
    assert (result.errors[2].host, result.errors[2].port) == ("h", 2)
    assert [p.refs for p in result.parts] == [(0,), (1,)]


def test_errors_inside_results_say_where() -> None:
    """A typed error of a single slot gets host and port filled in, also where the host named itself only."""
    errors = {0: StaleSlotError("gone"), 1: StaleSlotError("gone", host="h"), 2: StaleSlotError("gone", host="other")}
    result: ReadResult = ask(ReadResult((), errors), READ)
    assert [(e.host, e.port) for e in result.errors.values()] == [("h", 2), ("h", 2), ("other", None)]


def test_an_answer_that_leaves_a_slot_out_is_corrupt() -> None:
    """A slot that the answer does not mention is CorruptPayload, never a short read."""
    result: ReadResult = ask(ReadResult((part(0), part(2))), READ)
    assert {at: type(e) for at, e in result.errors.items()} == {1: CorruptPayload}


def broken_parts() -> dict[str, Part]:
    """Payloads of slot 1 that are not what was announced."""
    good = part(1)
    other = Block(1, {"x": Dense(torch.full((1, 2), 1.0, dtype=torch.float64))})
    wrong_field = Block(1, {"y": good.block.columns["x"]})
    return {
        "too few rows": Part((1,), Block(0, {"x": Dense(torch.empty(0, 2))}), good.nbytes, good.schema),
        "too many rows": Part((1,), part(1, rows=2).block, good.nbytes, good.schema),
        "another length": Part((1,), good.block, (good.nbytes[0] + 1,), good.schema),
        "another dtype": Part((1,), other, (other.nbytes,), good.schema),
        "another field": Part((1,), wrong_field, good.nbytes, wrong_field.schema_hash()),
        "another bit": Part((1,), part(1, 2.0).block, good.nbytes, good.schema, good.checksums),
        "a column too short": Part((1,), Block(1, {"x": Dense(torch.empty(0, 2))}), good.nbytes, good.schema),
        "no length": Part((1,), good.block, (), good.schema),
    }


@pytest.mark.parametrize("damage", broken_parts())
def test_a_payload_that_is_not_what_was_announced_is_corrupt(damage: str) -> None:
    """Length, schema and checksum are compared with what the host said; the other slots are kept."""
    result: ReadResult = ask(ReadResult((part(0), broken_parts()[damage], part(2))), READ)
    assert {at: type(e) for at, e in result.errors.items()} == {1: CorruptPayload}
    assert (result.errors[1].retryable, result.errors[1].blames_port, result.errors[1].port) == (True, True, 2)
    assert [p.refs for p in result.parts] == [(0,), (2,)]


def test_one_bad_slot_of_a_joint_payload_is_cut_out() -> None:
    """Where several slots came in one block, those that match their checksum are kept."""
    block = Block(3, {"x": Dense(torch.arange(6.0).reshape(3, 2))})
    sums = tuple(block.checksum([row]) for row in range(3))
    joint = Part((0, 1, 2), block, (8, 8, 8), block.schema_hash(), (sums[0], sums[1] ^ 1, sums[2]))
    result: ReadResult = ask(ReadResult((joint,)), READ)
    assert set(result.errors) == {1}
    kept = {p.refs: p.block.columns["x"].values.tolist() for p in result.parts}  # type: ignore[attr-defined]
    assert kept == {(0,): [[0.0, 1.0]], (2,): [[4.0, 5.0]]}


@virtual
async def test_no_group_leaves_the_client() -> None:
    """Reads of several hosts fail as one typed error each, never as an ExceptionGroup, however many fail at once."""
    plan = FaultPlan().on(call="ReadSlots").error("RuntimeError", "odd")
    async with Rig(plan, hosts=3) as rig:
        for first in range(3):
            await rig.fill(1, first)
        assert (
            len({c.place.host.id for r in rig.transport.plane.partitions["p"].rows.values() for c in r.cells.values()})
            == 3
        )
        with pytest.raises(DataPlaneReadError, match="odd"):
            await rig.get(["s0", "s1", "s2"])
        assert rig.leftovers() == {}
