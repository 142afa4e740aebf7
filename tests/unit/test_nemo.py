"""The option ``nemo``: its config, and its errors as NeMo-RL's code classifies them."""

from __future__ import annotations

import pickle
from typing import Any

import anyio
import pytest
import torch
from tensordict import TensorDict

from asyncdp import (
    ClaimLost,
    ClaimNotReady,
    Client,
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneClearError,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    KVBatchMeta,
    Layer,
    MemoryTransport,
    Metrics,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
    build_data_plane_client,
    layers_of,
)
from asyncdp.config import NemoSettings, parse_config
from asyncdp.nemo.layer import Nemo

BASE = {"enabled": True, "impl": "memory"}
#: What NeMo-RL's examples have, flat as in August 2026.
THEIRS = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "storage_capacity": 1000,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.5,
    "global_segment_size": 1 << 39,
    "local_buffer_size": 1 << 36,
    "controller_address": None,
    "observability": {"enabled": False},
}


class Raises(Layer):
    """Raises an error instead of serving a call."""

    error: BaseException

    async def execute(self, call: Any, ctx: Any) -> Any:
        """Raise it."""
        raise self.error


def leaving(error: BaseException, **settings: bool) -> BaseException:
    """Return what leaves a client with the option where this error is raised below."""

    async def check() -> BaseException:
        faulty = Raises(MemoryTransport())
        faulty.error = error
        client = Client(Nemo(faulty, NemoSettings(**settings)))
        try:
            await client.get_samples(["a", "b"], "p", ["x"])
        except BaseException as err:  # noqa: BLE001 - looked at by the test
            return err
        raise AssertionError

    return anyio.run(check)


def partial(*errors: DataPlaneError, ok: int = 1) -> PartialReadError:
    """Make the error of a read of which ``ok`` rows came."""
    good = KVBatchMeta("p", sample_ids=[f"ok{i}" for i in range(ok)])
    bad = KVBatchMeta("p", sample_ids=[f"bad{i}" for i in range(len(errors))])
    rows = TensorDict({"x": torch.zeros(ok)}, [ok])
    return PartialReadError("some came", rows=rows, ok=good, failed=bad, errors=dict(enumerate(errors, ok)))


INFRASTRUCTURE = {
    "unavailable": DataPlaneUnavailable("gone", host="h", port=1, retry_after_s=2.0),
    "not ready": DataPlaneNotReady("full", retry_after_s=1.5),
    "corrupt": CorruptPayload("bits"),
    "read that may pass": DataPlaneReadError("odd", retryable=True),
    "write that may pass": DataPlaneWriteError("odd", blames_port=True, retryable=True),
    "clear that may pass": DataPlaneClearError("odd", retryable=True),
    "in a group": ExceptionGroup("g", [ExceptionGroup("g", [DataPlaneUnavailable("gone")])]),
    "some rows": partial(SampleNotFound("no"), DataPlaneUnavailable("gone")),
    "all rows": partial(DataPlaneUnavailable("gone"), DataPlaneUnavailable("gone"), ok=0),
}
OTHERS = {
    "stale": StaleSlotError("old"),
    "not found": SampleNotFound("no"),
    "bad request": DataPlaneBadRequest("no"),
    "claim lost": ClaimLost("no"),
    "closed": DataPlaneClosed("closed"),
    "read": DataPlaneReadError("odd"),
    "write": DataPlaneWriteError("odd"),
    "claim": ClaimNotReady("too few", ready=1),
    "timeout": DataPlaneTimeout("slow"),
    "missing rows": partial(SampleNotFound("no")),
}


@pytest.mark.parametrize("name", INFRASTRUCTURE)
def test_errors_of_the_infrastructure_are_connection_errors(name: str) -> None:
    """Of the same class and attributes as before, after pickling too; without the setting they are what they were."""
    given = INFRASTRUCTURE[name]
    found = leaving(given)
    assert isinstance(found, ConnectionError)
    assert isinstance(found, DataPlaneError)
    assert not isinstance(found, BaseExceptionGroup)
    if isinstance(given, DataPlaneError) and name != "all rows":
        assert isinstance(found, type(given))
        assert vars(found).items() >= {"message": given.message, "host": given.host, "op": "get_samples"}.items()
        assert getattr(found, "retry_after_s", None) == getattr(given, "retry_after_s", None)
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is type(found)
    assert str(again) == str(found)
    assert not isinstance(leaving(given, infrastructure_errors=False), ConnectionError)


@pytest.mark.parametrize("name", OTHERS)
def test_other_errors_are_none(name: str) -> None:
    """What is wrong with the request or its rows is no ConnectionError, nor is a claim that found too little."""
    found = leaving(OTHERS[name])
    assert isinstance(found, type(OTHERS[name]))
    assert not isinstance(found, ConnectionError)


def test_errors_that_are_no_errors_of_the_plane_pass() -> None:
    """Alone and in groups."""
    assert isinstance(leaving(RuntimeError("bug")), RuntimeError)
    assert isinstance(leaving(ExceptionGroup("g", [RuntimeError("bug")])), ExceptionGroup)


@pytest.mark.parametrize("shape", ["flat", "nested", "nested mooncake", "OmegaConf", "duck"])
def test_only_the_impl_of_a_config_changes(shape: str) -> None:
    """NeMo-RL's config, flat or nested, of OmegaConf or of any class with a mapping's methods, opens ucxx."""
    config: Any = {**THEIRS, "impl": "ucxx"}
    if shape.startswith("nested"):
        sizes = {key: config.pop(key) for key in ("global_segment_size", "local_buffer_size")}
        units = {key: config.pop(key) for key in ("storage_capacity", "num_storage_units")}
        config |= {"simple": units, "mooncake_cpu": sizes}
        if shape == "nested mooncake":
            config |= {"backend": "mooncake_cpu", "simple": {}, "mooncake_cpu": {**units, **sizes}}
    if shape == "OmegaConf":
        omegaconf = pytest.importorskip("omegaconf")
        config = omegaconf.OmegaConf.create(config)
    if shape == "duck":
        config = _Duck({**config, "observability": _Duck(config["observability"])})
    parsed = parse_config(config)
    assert (parsed.impl, parsed.backend, parsed.num_storage_units) == ("ucxx", "valkey", 2)
    assert parsed.storage_capacity == 1000
    assert parsed.nemo is None


class _Duck:
    """Has a mapping's methods, and is none."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def keys(self) -> list[str]:
        return list(self._values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]


def test_the_option_is_a_bool_or_a_mapping() -> None:
    """True and an empty mapping select all defaults; puts then declare their partition, unless the config says no."""
    assert parse_config({**BASE, "nemo": True}).nemo == parse_config({**BASE, "nemo": {}}).nemo == NemoSettings()
    assert parse_config({**BASE, "nemo": False}).nemo is parse_config({**BASE, "nemo": None}).nemo is None
    assert parse_config({**BASE, "nemo": {"rectangles": False}}).nemo == NemoSettings(rectangles=False)
    assert [parse_config({**BASE, "nemo": on}).auto_register for on in (True, {}, False)] == [True, True, False]
    assert not parse_config({**BASE, "nemo": True, "auto_register": False}).auto_register
    with pytest.raises(ValueError, match=r"^nemo\.rectangle: .*'rectangles'"):
        parse_config({**BASE, "nemo": {"rectangle": False}})


def test_the_layer_is_above_all_others_and_survives_pickling() -> None:
    """A client with the option is one after pickling; there is one Metrics layer, below."""
    client = build_data_plane_client({**BASE, "nemo": {"rectangles": False}})
    for one in (client, pickle.loads(pickle.dumps(client))):
        first, *others = layers_of(one)
        assert isinstance(first, Nemo)
        assert not first.settings.rectangles
        assert [type(layer) for layer in others].count(Metrics) == 1
    anyio.run(client.close)
