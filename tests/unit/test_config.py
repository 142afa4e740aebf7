"""A wrong config is refused by key, before anything is started."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import pytest

from asyncdp import DataPlaneConfig, MemoryTransport, build_data_plane_client, stack
from asyncdp.config import config_warnings, parse_config, plain_config
from asyncdp.service import layers_of
from asyncdp.testing.contract.rig import BASE

pytestmark = pytest.mark.anyio


#: {what is wrong: (changes to a good config, the key that the error names)}
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"mistyped": 1}, "mistyped"),
    "missing enabled": ({"enabled": ...}, "enabled"),
    "missing impl": ({"impl": ...}, "impl"),
    "unknown impl": ({"impl": "carrier pigeon"}, "impl"),
    "wrong type": ({"storage_capacity": "many"}, "storage_capacity"),
    "a fraction": ({"num_storage_units": 1.5}, "num_storage_units"),
    "zero": ({"num_storage_units": 0}, "num_storage_units"),
    "below zero": ({"call_timeout_s": -1}, "call_timeout_s"),
    "disabled": ({"enabled": False}, "enabled"),
    "enabled is text": ({"enabled": "yes"}, "enabled"),
    "another impl's backend": ({"backend": "mooncake_cpu"}, "backend"),
    "unknown backend": ({"backend": "floppy"}, "backend"),
    "unknown layer": ({"layers": {"mistyped": {}}}, "layers.mistyped"),
    "unknown setting": ({"layers": {"slot_retry": {"mistyped": 1}}}, "layers.slot_retry.mistyped"),
    "setting of another type": ({"layers": {"slot_retry": {"max_attempts": "four"}}}, "layers.slot_retry.max_attempts"),
    "setting out of range": ({"layers": {"slot_retry": {"max_attempts": 0}}}, "max_attempts"),
    "a time below zero": ({"layers": {"attempt_timeout": {"attempt_timeout_s": -1}}}, "attempt_timeout_s"),
    "a time as text": ({"layers": {"attempt_timeout": {"attempt_timeout_s": "10"}}}, "attempt_timeout_s"),
    "a quarantine below zero": ({"layers": {"port_rotation": {"quarantine_s": -1}}}, "quarantine_s"),
    "a default layer in a list": ({"layers": ["slot_retry"]}, "layers"),
    "a layer is a number": ({"layers": {"slot_retry": 4}}, "layers"),
    "unknown key of the impl": ({"memory": {"mistyped": 1}}, "memory.mistyped"),
    "wrong type of the impl": ({"memory": {"ports_per_host": "two"}}, "memory.ports_per_host"),
    "zero of the impl": ({"memory": {"rows_per_slot": 0}}, "memory.rows_per_slot"),
    "callback is no function": ({"observability": {"enabled": True, "callback": 1}}, "observability.callback"),
    "observability is bare": ({"observability": {}}, "observability.enabled"),
    "pattern without a group": ({"group_id_pattern": "{i}"}, "group_id_pattern"),
    "pattern is a number": ({"group_id_pattern": 1}, "group_id_pattern"),
    "lease of no time": ({"claim_lease_s": 0}, "claim_lease_s"),
    "acknowledgements in no time": ({"ack_timeout_ms": 0}, "ack_timeout_ms"),
    "owner is a number": ({"owner": 1}, "owner"),
    "owner is empty": ({"owner": ""}, "owner: expected str of length >= 1"),
    "address is empty": ({"controller_address": ""}, "controller_address: expected str"),
    "namespace is empty": (
        {"impl": "ucxx", "backend": "valkey", "ucxx": {"namespace": ""}},
        "ucxx.namespace: expected str",
    ),
    "folder is empty": ({"impl": "ucxx", "backend": "valkey", "ucxx": {"folder": ""}}, "ucxx.folder: expected str"),
}


@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_a_wrong_config_is_refused_by_key(what: str) -> None:
    """X7: ValueError that names the key, before anything is started."""
    changes, key = BAD_CONFIGS[what]
    config = {name: value for name, value in {**BASE, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        build_data_plane_client(config)


@pytest.mark.parametrize("config", [None, [], "memory", 1], ids=repr)
def test_a_config_is_a_mapping(config: Any) -> None:
    """X7: anything else is a ValueError."""
    with pytest.raises(ValueError, match="mapping"):
        build_data_plane_client(config)


def test_settings_of_stack_are_checked_too() -> None:
    """X7: a setting that no layer has, settings beside a list of layers, and a value out of range."""
    with pytest.raises(ValueError, match="mistyped"):
        stack(MemoryTransport(), mistyped=1)
    with pytest.raises(ValueError, match="max_rounds"):
        stack(MemoryTransport(), [], max_rounds=2)
    with pytest.raises(ValueError, match="max_rounds"):
        stack(MemoryTransport(), max_rounds=0)


MEMORY = {"enabled": True, "impl": "memory"}
UCXX = {"enabled": True, "impl": "ucxx"}
TQ = {"enabled": True, "impl": "transfer_queue"}

#: {what is wrong: (config, what the message says)}
NEAREST: dict[str, tuple[dict[str, Any], str]] = {
    "a key": (
        {**MEMORY, "storage_capacty": 1},
        r"^storage_capacty: .*did you mean 'storage_capacity'\? .*call_timeout_s",
    ),
    "a key of the impl": ({**MEMORY, "memory": {"port_per_host": 1}}, r"^memory\.port_per_host: .*'ports_per_host'\?"),
    "an impl": ({**MEMORY, "impl": "memmory"}, r"^impl: .*'memory', 'transfer_queue', 'ucxx'; did you mean 'memory'\?"),
    "a backend": ({**TQ, "backend": "simpel"}, r"^backend: .*'mooncake_cpu'.*; did you mean 'simple'\?"),
    "a value of the impl": ({**UCXX, "ucxx": {"lane": "of"}}, r"^ucxx\.lane: .*'auto', 'off'; did you mean 'off'\?"),
    "a layer": ({**MEMORY, "layers": {"slot_rety": {}}}, r"^layers\.slot_rety: .*'slot_retry'\? .*typed_errors"),
    "a setting": (
        {**MEMORY, "layers": {"slot_retry": {"max_attempt": 1}}},
        r"^layers\.slot_retry\.max_attempt: .*'max_attempts'\? .*backoff_cap_s",
    ),
    "a setting of the budget": (
        {**MEMORY, "layers": {"retry_budget": {"rato": 1}}},
        r"^layers\.retry_budget\.rato: .*'ratio'\? .*window_s",
    ),
    "a setting of another layer": (
        {**MEMORY, "layers": {"slot_retry": {"max_rounds": 1}}},
        r"^layers\.slot_retry\.max_rounds: .*'layers\.batch_retry\.max_rounds'\?",
    ),
    "a setting at the top": ({**MEMORY, "max_rounds": 1}, r"^max_rounds: .*'layers\.batch_retry\.max_rounds'\?"),
    "a key of the impl at the top": ({**UCXX, "lane": "off"}, r"^lane: .*'ucxx\.lane'\?"),
    "a key of observability": (
        {**MEMORY, "observability": {"enabled": True, "calback": print}},
        r"^observability\.calback: .*'callback'\?",
    ),
    "a key of the backend": ({**TQ, "simple": {"num_units": 1}}, r"^simple\.num_units: .*'num_storage_units'\?"),
    "a setting of stack()": ({**MEMORY, "layers": {"retry_budgt": {}}}, r"^layers\.retry_budgt: .*'retry_budget'\?"),
    "a setting of hosts": (
        {**UCXX, "ucxx": {"host": {"on_ful": 1}}},
        r"^ucxx\.host\.on_ful: .*'on_full'\? .*\bbind\b",
    ),
    "a value of hosts": (
        {**UCXX, "ucxx": {"host": {"on_full": "wiat"}}},
        r"^ucxx\.host\.on_full: 'wiat' is not one of 'wait', .*; did you mean 'wait'\?",
    ),
    "a setting of hosts one up": ({**UCXX, "ucxx": {"on_full": "wait"}}, r"^ucxx\.on_full: .*'ucxx\.host\.on_full'\?"),
    "a setting of the directory": (
        {**UCXX, "ucxx": {"directory": {"wake": 1}}},
        r"^ucxx\.directory\.wake: .*'wake_s'\? .*host_timeout_s",
    ),
}


@pytest.mark.parametrize("what", NEAREST)
def test_what_nobody_knows_is_answered_with_the_nearest(what: str) -> None:
    """An unknown key or value names the nearest one and all that there are, wherever it stands."""
    config, words = NEAREST[what]
    with pytest.raises(ValueError, match=words) as caught:
        build_data_plane_client(config)
    assert caught.value.__cause__ is None  # one traceback, not that of a library


#: {what cannot work: (config, what the message says)}
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "polls longer than the call": (
        {**MEMORY, "claim_meta_poll_interval_s": 60},
        r"^claim_meta_poll_interval_s: .*call_timeout_s \(60 s\)",
    ),
    "one timeout twice": (
        {**MEMORY, "ack_timeout_ms": 5, "layers": {"attempt_timeout": {"attempt_timeout_s": 1.0}}},
        r"^ack_timeout_ms: .*layers\.attempt_timeout\.attempt_timeout_s",
    ),
    "flat and nested": (
        {**TQ, "storage_capacity": 1, "simple": {"storage_capacity": 2}},
        r"^storage_capacity: .*simple\.storage_capacity",
    ),
    "a layer's settings twice": (
        {**MEMORY, "layers": [{"slot_retry": {}}, {"slot_retry": {"max_attempts": 1}}]},
        r"^layers\[1\]\.slot_retry: given twice",
    ),
    "an arena below one slot": (
        {**UCXX, "ucxx": {"host": {"arena_bytes": 4096}}},
        r"^ucxx\.host\.arena_bytes: 4096 is smaller than one slot \(unit_bytes: 16384\)",
    ),
    "slots above the arena": (
        {**UCXX, "ucxx": {"host": {"arena_bytes": 1 << 20, "max_slot_bytes": 2 << 20}}},
        r"^ucxx\.host\.max_slot_bytes: .*arena_bytes \(1048576\)",
    ),
    "ports above the last": ({**UCXX, "ucxx": {"host": {"first_port": 65535}}}, r"^ucxx\.host\.first_port: .*4 ports"),
    "silent between heartbeats": (
        {**UCXX, "ucxx": {"host": {"beat_s": 5}}},
        r"^ucxx\.host\.beat_s: .*ucxx\.directory\.host_timeout_s",
    ),
    "removed while it serves": (
        {**UCXX, "ucxx": {"directory": {"host_forget_s": 1}}},
        r"^ucxx\.directory\.host_forget_s: .*host_timeout_s",
    ),
    "a namespace twice": (
        {**UCXX, "ucxx": {"directory": {"namespace": "x"}}},
        r"^ucxx\.directory\.namespace: .*ucxx\.",
    ),
    "hosts of one name": ({**UCXX, "ucxx": {"host": {"host_id": "x"}}}, r"^ucxx\.host\.host_id: .*numbered"),
    "gone between heartbeats": (
        {**TQ, "transfer_queue": {"heartbeat_interval_s": 2}},
        r"^transfer_queue\.heartbeat_timeout_s: .*heartbeat_interval_s \(2 s\)",
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_work_is_refused(what: str) -> None:
    """Keys that are right by themselves and not together: ValueError that names both, before anything is started."""
    config, words = IMPOSSIBLE[what]
    with pytest.raises(ValueError, match=words):
        build_data_plane_client(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ack_timeout_ms": 90_000}, "^ack_timeout_ms: .*call_timeout_s"),
        ({"claim_lease_s": 0.01}, "^claim_lease_s: .*claim_meta_poll_interval_s"),
        ({"storage_capacity": 1}, "^storage_capacity: .*num_storage_units"),
        ({"local_buffer_size": 1}, "^local_buffer_size: has no effect"),
    ],
    ids=str,
)
def test_what_is_odd_is_a_warning(keys: dict[str, Any], words: str) -> None:
    """It names the key, and the client is made."""
    with pytest.warns(UserWarning, match=words):
        build_data_plane_client({**MEMORY, **keys})


async def test_two_keys_are_a_config() -> None:
    """All but enabled and impl have defaults, also where an attempt is to be shorter than the default poll."""
    for keys in ({}, {"call_timeout_s": 0.02}):
        async with build_data_plane_client({**MEMORY, **keys}) as client:
            await client.register_partition("p", ["x"], 4, ["train"])
            mate = build_data_plane_client(client.attach_config(), bootstrap=False)
            assert [one.partition_id for one in await mate.list_partitions()] == ["p"]
            await mate.close()
    assert (parse_config(TQ).backend, parse_config(UCXX).backend) == ("simple", "valkey")


def test_the_seeds_configs_are_taken_as_they_are() -> None:
    """Flat, or nested under the name of the backend; that of another backend is checked, and left alone."""
    sizes = {"storage_capacity": 7, "num_storage_units": 3}
    flat = {**TQ, "backend": "simple", **sizes, "claim_meta_poll_interval_s": 0.5, "global_segment_size": 1,
            "local_buffer_size": 1, "controller_address": "a:1", "ack_timeout_ms": 5}  # fmt: skip
    assert parse_config(flat).storage_capacity == 7
    nested = {**TQ, "simple": sizes, "mooncake_cpu": {"global_segment_size": 1, "local_buffer_size": 2}}
    parsed = parse_config(nested)
    assert (parsed.storage_capacity, parsed.num_storage_units, parsed.global_segment_size) == (7, 3, None)
    assert parse_config({**nested, "backend": "mooncake_cpu"}).local_buffer_size == 2
    assert plain_config(nested) == {**TQ, **sizes}


@pytest.mark.parametrize("key", ["global_segment_size", "local_buffer_size"])
def test_mooncake_needs_its_sizes(key: str) -> None:
    """Both are required with mooncake_cpu, by name, and only there."""
    sizes = {"global_segment_size": 1, "local_buffer_size": 2}
    whole = {**TQ, **sizes, "backend": "mooncake_cpu"}
    assert config_warnings(parse_config(whole)) == []
    assert config_warnings(parse_config({**TQ, "backend": "simple"})) == []
    with pytest.raises(ValueError, match=rf"^{key}: .*mooncake_cpu"):
        parse_config({**whole, key: None})


@pytest.mark.parametrize("more", [{}, {"impl": "?"}, {"mistyped": 1}, {"simple": 3}, {"layers": 5}], ids=str)
def test_a_disabled_config_says_so_first(more: dict[str, Any]) -> None:
    """Whatever else is missing or wrong in it."""
    with pytest.raises(ValueError, match=r"^enabled: the data plane is disabled"):
        build_data_plane_client({"enabled": False, **more})


def test_none_stands_for_the_default() -> None:
    """An empty key of a YAML file is absent, at every depth."""
    names = DataPlaneConfig.__optional_keys__
    assert parse_config({**MEMORY, **dict.fromkeys(names)}) == parse_config(MEMORY)
    deep = {"layers": {"slot_retry": {"max_attempts": None}, "batch_retry": None}, "memory": {"ports_per_host": None}}
    assert plain_config({**MEMORY, **deep}) == {**MEMORY, "layers": {"slot_retry": {}}, "memory": {}}
    build_data_plane_client({**MEMORY, **deep})


async def test_a_config_of_omegaconf_is_a_config() -> None:
    """Nested and interpolated; what other processes attach with holds nothing of OmegaConf's."""
    omegaconf = pytest.importorskip("omegaconf")
    text = """
    enabled: true
    impl: memory
    storage_capacity: 512
    num_storage_units: ${storage_capacity}
    observability:
    memory: {ports_per_host: 2, slots_per_host: null}
    layers: [{slot_retry: {max_attempts: 2}}]
    """
    config = omegaconf.OmegaConf.create(text)
    async with build_data_plane_client(config) as client:
        told = client.attach_config()
        assert json.loads(json.dumps(told)) == told
        assert isinstance(told["layers"][0], dict)
        assert told["num_storage_units"] == 512
    missing = omegaconf.OmegaConf.create({**MEMORY, "memory": {"ports_per_host": "???"}})
    with pytest.raises(ValueError, match=r"memory.*cannot be read.*ports_per_host"):
        build_data_plane_client(missing)


def test_paths_and_enumerations_are_taken_by_value(tmp_path: Path) -> None:
    """As YAML would have given them."""

    class Impl(enum.StrEnum):
        UCXX = "ucxx"

    parsed = parse_config({"enabled": True, "impl": Impl.UCXX, "ucxx": {"folder": tmp_path}})
    assert (type(parsed.impl), parsed.ucxx and parsed.ucxx.folder) == (str, str(tmp_path))


async def test_a_good_config_gives_its_settings_to_the_layers() -> None:
    """layers, ack_timeout_ms and call_timeout_s arrive where they belong."""
    config = {
        **BASE,
        "ack_timeout_ms": 2500,
        "call_timeout_s": 7,
        "layers": {"slot_retry": {"max_attempts": 2}, "batch_retry": {"max_rounds": 1}},
    }
    async with build_data_plane_client(config) as client:
        settings = {}
        for layer in layers_of(client):
            settings.update(
                {k: v for k, v in vars(layer).items() if k in ("max_attempts", "max_rounds", "attempt_timeout_s")}
            )
        assert settings == {"max_attempts": 2, "max_rounds": 1, "attempt_timeout_s": 2.5}
        assert client.call_timeout_s == 7
