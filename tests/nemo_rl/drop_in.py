"""A pytest plugin with which NeMo-RL's tests run on asyncdp: its factory, its in-memory adapter, its metas.

Loaded by tests.nemo_rl in a process whose working directory is a checkout of NeMo-RL, after sitecustomize.py, which
installs the stubs. Nothing of the checkout changes.
"""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")

#: Impl on which clients of NeMo-RL's factory run, and whether its helpers are asyncdp's too.
IMPL = os.environ["ASYNCDP_NEMO_IMPL"]
HELPERS = os.environ.get("ASYNCDP_NEMO_HELPERS") == "1"

import asyncdp.nemo_rl as ours  # noqa: E402
import nemo_rl.data_plane as plane  # noqa: E402
from asyncdp.batching import padding, sharding  # noqa: E402
from nemo_rl.data_plane import codec, factory, interfaces, observability  # noqa: E402
from nemo_rl.data_plane.adapters import noop  # noqa: E402


def build(cfg: Any, *, bootstrap: bool = True) -> Any:
    """Build a client as the drop-in does, on the impl under test where the config asks for TransferQueue."""
    if cfg is not None and cfg.get("impl") == "transfer_queue":
        own = {"ucxx": {"host": {"arena_bytes": 1 << 28}}} if IMPL == "ucxx" else {}
        cfg = {**cfg, "impl": IMPL, "num_storage_units": 1, **own}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ours.build_data_plane_client(cfg, bootstrap=bootstrap)


class InMemory(ours.DataPlaneClient):
    """What stands for NeMo-RL's in-memory adapter: a memory plane of its own, on which partitions are declared."""

    def __init__(self) -> None:
        """Start a plane."""
        config = {"enabled": True, "impl": "memory", "nemo": {"find_plane": False}, "auto_register": False}
        super().__init__(ours.build_async_client(config))


factory.build_data_plane_client = plane.build_data_plane_client = build
interfaces.KVBatchMeta = plane.KVBatchMeta = observability.KVBatchMeta = ours.KVBatchMeta
noop.NoOpDataPlaneClient = InMemory
observability.MetricsDataPlaneClient = plane.MetricsDataPlaneClient = ours.MetricsDataPlaneClient
if HELPERS:
    for name in ("to_nested_by_length", "stack_or_nest", "pack_jagged_fields", "pack_per_token_field"):
        setattr(codec, name, getattr(padding, name))
    codec.response_from_nested = padding.response_from_nested
    importlib.import_module("nemo_rl.data_plane.preshard").shard_meta_for_dp = sharding.shard_meta_for_dp


def _config(backend: str) -> dict[str, Any]:
    sizes = {"global_segment_size": 1 << 33, "local_buffer_size": 1 << 30, "claim_meta_poll_interval_s": 0.5}
    return {
        "enabled": True,
        "impl": "transfer_queue",
        "backend": backend,
        "storage_capacity": 1024,
        "num_storage_units": 1,
        **sizes,
    }


@pytest.fixture(scope="session")
def session_client() -> Iterator[Any]:
    """Yield the client that all tests of the session share, as in NeMo-RL's conftest."""
    client = build(_config("simple"))
    yield client
    client.close()


@pytest.fixture
def tq_client(session_client: Any) -> Any:
    """Give the shared client."""
    return session_client


@pytest.fixture(params=["simple", "mooncake_cpu"])
def tq_client_backends(request: pytest.FixtureRequest) -> Any:
    """Give the shared client; mooncake_cpu is skipped, as it is where mooncake is not installed."""
    if request.param == "mooncake_cpu":
        pytest.skip("mooncake is not installed")
    return request.getfixturevalue("session_client")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Let clients that a test did not close go at its end."""
    yield
    gc.collect()
