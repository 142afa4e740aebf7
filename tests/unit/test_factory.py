"""What stack() and build_data_plane_client are given by mistake is refused in a user's own words."""

from __future__ import annotations

import math
import pickle
import random
import sys
import types
from typing import Any

import pytest

from asyncdp import (
    DataPlaneUnavailable,
    Layer,
    MemoryTransport,
    Metrics,
    Reconcile,
    SlotRetry,
    TypedErrors,
    build_data_plane_client,
    factory,
    stack,
)
from asyncdp.calls import CallContext, PutSamples, handles
from asyncdp.clock import AnyioClock
from asyncdp.factory import DEFAULT_LAYERS, default_layers, layers_of

HUGE = 10**400
CONFIG: dict[str, Any] = {
    "enabled": True,
    "impl": "memory",
    "backend": "simple",
    "storage_capacity": 16,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.01,
}


# --- configs

#: {what is wrong: (changes to a good config, what the message says)}
BAD: dict[str, tuple[dict[Any, Any], str]] = {
    "a key is a number": ({3: 1}, r"^3: keys are strings"),
    "a layer is a number": ({"layers": {3: {}}}, r"^layers\.3: keys are strings"),
    "a setting is a number": ({"layers": {"batch_retry": {3: 1}}}, r"^layers\.batch_retry\.3: keys are strings"),
    "a key of the impl": ({"memory": {3: 1}}, r"^memory\.3: keys are strings"),
    "a layer of text": ({"layers": {"batch_retry": "two"}}, r"^layers\.batch_retry: "),
    "a table of nothing": ({"layers": {"typed_errors": {"table": 5}}}, r"^layers\.typed_errors\.table: .*not 5"),
    "a table of text": ({"layers": {"typed_errors": {"table": "ab"}}}, r"^layers\.typed_errors\.table: .*not 'ab'"),
    "an endless quarantine": ({"layers": {"port_rotation": {"quarantine_s": math.inf}}}, r"\bquarantine_s must be"),
    "a quarantine above its end": (
        {"layers": {"port_rotation": {"quarantine_max_s": 10}}},
        r"\bquarantine_max_s \(10\) .* \bquarantine_s \(30",
    ),
    "no decay": ({"layers": {"port_rotation": {"quarantine_decay_s": math.inf}}}, r"\bquarantine_decay_s must be"),
    "a contact without end": ({"layers": {"port_rotation": {"first_contact_s": math.inf}}}, r"\bfirst_contact_s must"),
    "a wait above its end": (
        {"layers": {"slot_retry": {"backoff_base_s": 5}}},
        r"\bbackoff_cap_s \(2.0\) .* \bbackoff_base_s \(5\)",
    ),
    "a round's wait above its end": (
        {"layers": {"batch_retry": {"round_backoff_base_s": 5}}},
        r"\bround_backoff_cap_s \(2.0\) .* \bround_backoff_base_s \(5\)",
    ),
    "more than a float": ({"layers": {"slot_retry": {"backoff_cap_s": HUGE}}}, r"^layers\.slot_retry\.backoff_cap_s: "),
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_config_is_refused_by_the_users_key(what: str) -> None:
    """ValueError that says the key as the user wrote it, and no name of what the layer makes of it."""
    changes, words = BAD[what]
    with pytest.raises(ValueError, match=words) as caught:
        build_data_plane_client({**CONFIG, **changes})
    assert " base_s" not in f" {caught.value}"
    assert " max_s" not in f" {caught.value}"
    assert " cap_s" not in f" {caught.value}"


def test_observability_that_is_none_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty ``observability:`` of a YAML file counts as none, for every transport and for who attaches."""
    client = build_data_plane_client({**CONFIG, "observability": None})
    again = build_data_plane_client(client.attach_config(), bootstrap=False)
    assert again.get_capabilities() == client.get_capabilities()
    seen: list[Any] = []

    def opened(config: Any, *_: Any, **__: Any) -> MemoryTransport:
        seen.append(config)
        return MemoryTransport()

    monkeypatch.setattr(factory, "_transport", opened)
    build_data_plane_client({**CONFIG, "observability": None})
    assert seen == [CONFIG]


def test_layers_of_nothing_are_refused_without_a_config_too() -> None:
    """The mapping of default_layers() is checked like the config's."""
    with pytest.raises(ValueError, match=r"^layers\.slot_retry: "):
        default_layers({"slot_retry": None})  # type: ignore[dict-item]


# --- layers of the user's own


class Counting(Layer):
    """A layer as a user writes it."""

    seen = 0

    @handles(PutSamples)
    async def put(self, call: PutSamples, ctx: CallContext) -> Any:
        """Count, and pass on."""
        type(self).seen += 1
        return await self.inner.execute(call, ctx)


class Lower(Layer):
    """Another one."""


WHERE = f"{__name__}:Counting"


def kinds(client: Any) -> list[type]:
    """The classes of a stack, outermost first."""
    return [type(layer) for layer in layers_of(client)]


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this file importable, as a user's module is."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _module())


def _module() -> types.ModuleType:
    module = types.ModuleType(__name__)
    vars(module).update(Counting=Counting, Lower=Lower, Number=3)
    return module


@pytest.mark.usefixtures("by_name")
@pytest.mark.parametrize("given", [Counting, WHERE], ids=["class", "name"])
@pytest.mark.parametrize("place", ["argument", "config"])
def test_a_layer_of_ones_own_stands_above_the_default_ones(given: Any, place: str) -> None:
    """By the argument, or in a list of the config, as the class or by its name; settings of layers go with it."""
    if place == "argument":
        if isinstance(given, str):
            given = Counting
        client = build_data_plane_client({**CONFIG, "layers": {"slot_retry": {"max_attempts": 2}}}, layers=[given])
    else:
        client = build_data_plane_client({**CONFIG, "layers": [given, {"slot_retry": {"max_attempts": 2}}]})
    made = list(layers_of(client))
    assert kinds(client) == [Metrics, Counting, *DEFAULT_LAYERS.values(), MemoryTransport]
    assert [layer.max_attempts for layer in made if isinstance(layer, SlotRetry)] == [2]


def test_both_lists_count() -> None:
    """Those of the argument stand above those of the config."""
    client = build_data_plane_client({**CONFIG, "layers": [Lower]}, layers=[Counting])
    assert kinds(client)[1:3] == [Counting, Lower]


def test_a_list_with_default_layers_is_the_whole_stack() -> None:
    """So a layer can stand below some of them; settings beside such a list are refused."""
    client = build_data_plane_client(CONFIG, layers=[*default_layers(max_attempts=3), Lower])
    assert kinds(client) == [Metrics, *DEFAULT_LAYERS.values(), Lower, MemoryTransport]
    for keys, named in (
        ({"layers": {"slot_retry": {"max_attempts": 2}}}, r"layers\.slot_retry\.max_attempts"),
        ({"ack_timeout_ms": 5}, "ack_timeout_ms"),
    ):
        with pytest.raises(ValueError, match=f"^{named}: .*list of layers"):
            build_data_plane_client({**CONFIG, **keys}, layers=default_layers())


@pytest.mark.anyio
async def test_layers_of_ones_own_travel_with_the_client() -> None:
    """A pickled client is made again with them."""
    async with build_data_plane_client(CONFIG, layers=[Counting]) as client:
        again = pickle.loads(pickle.dumps(client))
        assert kinds(again)[1] is Counting
        before = Counting.seen
        await again.register_partition("p", ["x"], 1, ["t"])
        await again.put_samples(["a"], "p", {"x": [1.0]})
        assert Counting.seen == before + 1
        await again.close()


@pytest.mark.usefixtures("by_name")
@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["slot_retry"], r"^layers\[0\]: 'slot_retry' is there by default"),
        (["Counting"], r"^layers\[0\]: 'Counting' does not name a layer as 'package.module:Name'"),
        (["nowhere.at.all:X"], r"^layers\[0\]: .*cannot be imported"),
        ([Lower, f"{__name__}:Countin"], r"^layers\[1\]: 'Countin' is not one of .*did you mean 'Counting'\?"),
        ([3], r"^layers\[0\]: must be a layer.* not 3"),
        ([{"slot_rety": {}}], r"^layers\.slot_rety: .*'slot_retry'"),
        ([{"slot_retry": 3}], r"^layers\.slot_retry: must be a mapping"),
        ("slot_retry", "^layers: "),
    ],
    ids=str,
)
def test_a_wrong_layer_of_the_config_is_named(layers: Any, words: str) -> None:
    """ValueError with its place in the list."""
    with pytest.raises(ValueError, match=words):
        build_data_plane_client({**CONFIG, "layers": layers})


def test_what_has_layers_gets_no_second_ones() -> None:
    """stack() around a client of stack() or build_data_plane_client(), or around default layers, says what to do."""
    for there in (stack(MemoryTransport()), build_data_plane_client(CONFIG), Lower(stack(MemoryTransport()))):
        with pytest.raises(TypeError, match=r"transport has layers already \(.*SlotRetry.*layers=\[\.\.\.\]"):
            stack(there)
    with pytest.raises(TypeError, match=r"transport has layers already \(TypedErrors\)"):
        stack(TypedErrors(MemoryTransport()), [])
    assert kinds(stack(Lower(MemoryTransport()), []))[-2:] == [Lower, MemoryTransport]


# --- tables of errors

BAD_TABLES: list[Any] = [
    5,
    None,
    "ab",
    b"ab",
    {"a": DataPlaneUnavailable},
    [3],
    ["ab"],
    [(OSError,)],
    [(OSError, DataPlaneUnavailable, 1)],
    [(int, DataPlaneUnavailable)],
    [(3, DataPlaneUnavailable)],
    [(OSError, "DataPlaneUnavailable")],
    [("RayActorError", 3)],
]


@pytest.mark.parametrize("table", BAD_TABLES, ids=repr)
def test_a_table_of_errors_is_a_sequence_of_pairs(table: Any) -> None:
    """Anything else is a ValueError that names the setting and says what a table is."""
    with pytest.raises(ValueError, match=r"^layers\.typed_errors\.table: .*pairs"):
        default_layers({"typed_errors": {"table": table}})
    with pytest.raises(ValueError, match=r"^table: .*pairs"):
        stack(MemoryTransport(), table=table)


def test_a_good_table_arrives_in_front() -> None:
    """Pairs by class and by class name are taken, in tuples or lists; the first row that matches counts."""
    table = [(OSError, DataPlaneUnavailable), ["RayActorError", lambda *_, **__: DataPlaneUnavailable("gone")]]
    client = stack(MemoryTransport(), table=table)
    layer = next(layer for layer in layers_of(client) if isinstance(layer, TypedErrors))
    assert list(layer.table[:2]) == table


# --- arguments of stack


class OneVerb:
    """The least that is a client."""

    async def get_samples(self, sample_ids: Any, partition_id: str, select_fields: Any) -> Any:
        """Get nothing."""


class NoVerb:
    """It can be closed, as files can."""

    async def close(self) -> None:
        """Close."""


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (None, "transport is None"),
        (object(), "transport is of type object, .*none of the verbs"),
        (NoVerb(), "transport is of type NoVerb"),
        ("memory", "transport is of type str"),
        (MemoryTransport, r"transport is the class MemoryTransport.*MemoryTransport\(\.\.\.\)"),
        (OneVerb, "transport is the class OneVerb"),
    ],
    ids=["none", "an object", "no verb", "a text", "a class", "a class of one verb"],
)
def test_what_has_no_verbs_is_no_transport(transport: Any, words: str) -> None:
    """TypeError that says what was given; one verb is enough for a client."""
    with pytest.raises(TypeError, match=words):
        stack(transport)
    stack(OneVerb())


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (3, "^layers must be a sequence .*not 3"),
        ("ab", "^layers must be a sequence .*not 'ab'"),
        (SlotRetry, "^layers must be a sequence .*SlotRetry"),
        ([3], r"^layers\[0\] must be .*not 3"),
        ([SlotRetry, None], r"^layers\[1\] must be .*not None"),
        ([lambda inner: None], "lambda.* returned is None"),  # noqa: ARG005
        ([lambda inner: SlotRetry], "lambda.* returned is the class SlotRetry"),  # noqa: ARG005
    ],
    ids=["a number", "a text", "a class", "of numbers", "one is none", "one returns none", "one returns a class"],
)
def test_layers_are_callables_that_return_clients(layers: Any, words: str) -> None:
    """TypeError that says which one is not."""
    with pytest.raises(TypeError, match=words):
        stack(MemoryTransport(), layers)


class HalfAClock:
    """It can tell the time, but not sleep."""

    def now(self) -> float:
        """Tell the time."""
        return 0.0

    time = now


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("call_timeout_s", "x"),
        ("call_timeout_s", -1),
        ("call_timeout_s", 0),
        ("call_timeout_s", math.nan),
        ("call_timeout_s", True),
        ("call_timeout_s", HUGE),
        ("claim_poll_s", "x"),
        ("claim_poll_s", -1),
        ("on_event", 3),
        ("clock", 3),
        ("clock", HalfAClock()),
        ("rng", 3),
        ("attempt_timeout_s", HUGE),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_option_of_stack_is_refused_by_name(name: str, value: Any) -> None:
    """ValueError that begins with its name, before any layer is made."""
    with pytest.raises(ValueError, match=f"^{name}: "):
        stack(MemoryTransport(), **{name: value})


def test_right_options_of_stack_arrive() -> None:
    """What is checked is kept as it was given."""
    clock, rng, events = AnyioClock(), random.Random(0), []  # type: ignore[var-annotated]
    client = stack(
        MemoryTransport(),
        iter([SlotRetry]),  # type: ignore[arg-type]
        clock=clock,
        rng=rng,
        on_event=events.append,
        call_timeout_s=math.inf,
        claim_poll_s=1,
    )
    assert (client.env.clock, client.env.rng, client.env.claim_poll_s) == (clock, rng, 1)
    assert client.call_timeout_s == math.inf
    assert any(isinstance(layer, SlotRetry) for layer in layers_of(client))


def test_what_other_clients_take_over_is_all_but_owner_and_callback() -> None:
    """Every transport shares its config by one rule, also where there is no observability."""
    from asyncdp.config import shared_config

    given = {"owner": "me", "observability": {"enabled": True, "callback": print}, "impl": "memory"}
    assert shared_config(given) == {"observability": {"enabled": True}, "impl": "memory"}
    assert shared_config({"observability": None}) == {"observability": None}
    assert given["owner"] == "me"


def test_a_layer_s_former_name_in_the_config_is_taken_with_a_warning() -> None:
    """``settle`` became ``reconcile``; it is taken for one version."""
    with pytest.warns(DeprecationWarning, match="layers.settle: it is layers.reconcile now"):
        layers = default_layers({"settle": {"close_timeout_s": 2.5}})
    client = stack(MemoryTransport(), layers)
    assert next(layer for layer in layers_of(client) if isinstance(layer, Reconcile)).close_timeout_s == 2.5
