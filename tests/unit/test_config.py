"""A wrong config is refused by key, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdp import (
    MemoryTransport,
    build_data_plane_client,
    stack,
)
from asyncdp.testing.contract.rig import BASE

pytestmark = pytest.mark.anyio


#: {what is wrong: (changes to a good config, the key that the error names)}
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"mistyped": 1}, "mistyped"),
    "missing key": ({"storage_capacity": ...}, "storage_capacity"),
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
    "layers are a list": ({"layers": ["slot_retry"]}, "layers"),
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
    "sizes are missing": ({"impl": "transfer_queue"}, "global_segment_size"),
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
        layer: Any = client
        while layer is not None:
            settings.update(
                {k: v for k, v in vars(layer).items() if k in ("max_attempts", "max_rounds", "attempt_timeout_s")}
            )
            layer = getattr(layer, "inner", None)
        assert settings == {"max_attempts": 2, "max_rounds": 1, "attempt_timeout_s": 2.5}
        assert client.call_timeout_s == 7
