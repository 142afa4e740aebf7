"""What docs/transfer_queue.md shows runs on a Ray of loopback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import blocks

pytest.importorskip("transfer_queue", reason="needs the extra: pip install 'asyncdp[tq]'")

BEFORE = """
from tests.transfer_queue.ray_cluster import start_ray

ray = start_ray()
"""
AFTER = """
import anyio


async def use():
    await client.register_partition("p", ["x"], 4, ["t"])
    await worker.put_samples(["a"], "p", {"x": [1.0]})
    assert (await client.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]
    await worker.close()
    await client.close()


anyio.run(use)
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_clients_of_the_page_share_a_plane(tmp_path: Path) -> None:
    """Driver and worker are opened as the page shows, and see the same samples."""
    (tmp_path / "page.py").write_text(BEFORE + blocks.program("docs/transfer_queue.md") + AFTER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "page.py")],
        cwd=blocks.ROOT,
        env={**os.environ, "PYTHONPATH": str(blocks.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
