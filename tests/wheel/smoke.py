"""What each extra is for, in a few lines that run in a venv with that extra alone. The empty name is asyncdp itself."""

from __future__ import annotations

from typing import Final

__all__ = ["SMOKE"]

MEMORY: Final = """
import asyncio, torch
from asyncdp import build_data_plane_client
async def main():
    async with build_data_plane_client({"enabled": True, "impl": "memory"}) as plane:
        await plane.register_partition("p", ["x"], 8, ["t"])
        await plane.put_samples(["a"], "p", {"x": torch.ones(1, 3)})
        assert (await plane.get_samples(["a"], "p", ["x"]))["x"].sum() == 3
asyncio.run(main())
"""
#: An extra that is missing is named, with how to get it, by what would need it.
UNNAMED: Final = """
import os, subprocess, sys
from asyncdp import build_data_plane_client
def said(work):
    try:
        work()
    except ImportError as err:
        return str(err)
    raise SystemExit("no ImportError")
for impl, extra in {"ucxx": "ucxx", "transfer_queue": "tq"}.items():
    config = {"enabled": True, "impl": impl, "controller_address": "redis://127.0.0.1:1"}
    text = said(lambda: build_data_plane_client(config, bootstrap=False))
    assert f"asyncdp[{extra}" in text, text
for module, extra in {"prometheus": "prometheus", "opentelemetry": "otel"}.items():
    text = said(lambda: __import__(f"asyncdp.metrics.{module}"))
    assert f"asyncdp[{extra}]" in text, text
done = subprocess.run([sys.executable, "-I", "-m", "asyncdp", "ping"], capture_output=True, text=True)
assert done.returncode == 1 and "asyncdp[cli]" in done.stderr and done.stderr.count("\\n") == 1, done
"""
COMMANDS: Final = """
import json, pathlib, subprocess, sys
def run(*words):
    return subprocess.run([sys.executable, "-I", "-m", "asyncdp", *words], capture_output=True, text=True)
import asyncdp
assert run("--version").stdout == f"asyncdp {asyncdp.__version__}\\n"
assert "doctor" in run("--help").stdout
json.loads(run("config", "schema").stdout)
pathlib.Path("c.json").write_text('{"enabled": true, "impl": "memory"}')
assert run("config", "check", "c.json").returncode == 0
done = run("doctor")
assert done.returncode == 0 and "pip install 'asyncdp[ucxx]'" in done.stdout, done
for impl, extra in {"ucxx": "ucxx", "transfer_queue": "tq"}.items():
    config = {"enabled": True, "impl": impl, "controller_address": "redis://127.0.0.1:1"}
    pathlib.Path("d.json").write_text(json.dumps(config))
    done = run("doctor", "--config", "d.json")
    assert done.returncode == 1 and f"pip install 'asyncdp[{extra}]'" in done.stdout, done
    done = run("ping", "--config", "d.json")
    assert done.returncode == 2 and f"asyncdp[{extra}" in done.stderr and done.stderr.count("\\n") == 1, done
assert "plots need: pip install 'asyncdp[plot]'" in " ".join(run("demo", "--plot", "x.png").stderr.split())
assert "asyncdp[ucxx]" in run("serve").stderr
assert "in a checkout of asyncdp only" in run("bench").stderr
from asyncdp.cli.top.page import PAGE
assert "<title>" in PAGE.read_text()
"""
PLANE: Final = """
import asyncio, torch
from asyncdp import build_data_plane_client
own = {"host": {"arena_bytes": 16 << 20, "max_slot_bytes": 4 << 20, "ucx": False}}
async def main():
    async with build_data_plane_client({"enabled": True, "impl": "ucxx", "num_storage_units": 1, "ucxx": own}) as plane:
        await plane.register_partition("p", ["x"], 8, ["t"])
        await plane.put_samples(["a"], "p", {"x": torch.ones(1, 3)})
        assert (await plane.get_samples(["a"], "p", ["x"]))["x"].sum() == 3
asyncio.run(main())
"""
NO_DIRECTORY: Final = """
import asyncio
from asyncdp import DataPlaneUnavailable, build_data_plane_client
import ucxx
async def main():
    config = {"enabled": True, "impl": "ucxx", "controller_address": "redis://127.0.0.1:1"}
    async with build_data_plane_client(config, bootstrap=False) as plane:
        try:
            await plane.ping(timeout_s=5)
        except DataPlaneUnavailable:
            return
    raise SystemExit("no error")
asyncio.run(main())
"""
PYTEST: Final = """
import pathlib, subprocess, sys
pathlib.Path("test_it.py").write_text('''
import pytest, torch
@pytest.mark.anyio
async def test_it(data_plane):
    await data_plane.register_partition("p", ["x"], 8, ["t"])
    await data_plane.put_samples(["a"], "p", {"x": torch.ones(1, 3)})
''')
words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
done = subprocess.run(words, capture_output=True, text=True)
assert done.returncode == 0, done.stdout + done.stderr
"""
#: By extra: what to install together, and what then works.
SMOKE: Final[dict[str, tuple[str, ...]]] = {
    "": (MEMORY, UNNAMED),
    "cli": (COMMANDS,),
    "plot": ("import asyncdp.examples.grpo_plot",),
    "ucxx": (NO_DIRECTORY,),
    "ucxx,embedded": (PLANE,),
    "tq": ("import ray, transfer_queue, asyncdp.transports.transfer_queue.transport",),
    "mooncake": ("import mooncake, asyncdp.transports.transfer_queue.mooncake.objects",),
    "otel": ("from asyncdp.metrics.opentelemetry import OpenTelemetry; OpenTelemetry().close()",),
    "prometheus": (
        "from asyncdp.metrics.prometheus import PrometheusCollector; list(PrometheusCollector().collect())",
    ),
    "testing": (PYTEST,),
}
