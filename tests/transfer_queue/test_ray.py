"""Beginning, finding and ending a plane in a real Ray cluster."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from typing import Any

import anyio
import pytest
import torch

from asyncdp import DataPlaneNotReady, DataPlaneUnavailable, build_data_plane_client, stack
from asyncdp.config import TransferQueueSettings, parse_config
from asyncdp.transports.transfer_queue.cluster import Cluster
from tests.transfer_queue.opener import CLUSTER
from tests.transfer_queue.ray_cluster import RayCluster, base_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> RayCluster:
    """Give the session's Ray cluster, with controller and two storage units."""
    made: RayCluster = CLUSTER()
    return made


def config(**more: Any) -> dict[str, Any]:
    """Return a config for a plane in that cluster."""
    return base_config(transfer_queue={"namespace": f"ray-{id(more)}", **more.pop("transfer_queue", {})}, **more)


async def test_a_controller_that_is_there_is_joined_not_owned(cluster: RayCluster) -> None:
    """Another bootstrap uses its actors, and its close leaves them running."""
    client = build_data_plane_client(config())
    await client.register_partition("p", ["x"], 1, ["train"])
    await client.put_samples(["a"], "p", {"x": torch.ones(1)})
    assert client.attach_config()["transfer_queue"]["endpoints"] == cluster.endpoints.to_config()
    await client.close()
    await stack(cluster.keeper).ping()


async def test_ray_alone_says_where_the_plane_is(cluster: RayCluster) -> None:
    """controller_address, Ray's address, is enough to attach; a client that Ray's pickle carries attaches as well."""
    owner = build_data_plane_client(config())
    told = owner.attach_config()
    del told["transfer_queue"]["endpoints"]
    for worker in (build_data_plane_client(told, bootstrap=False), pickle.loads(pickle.dumps(owner))):
        await worker.ping()
        await worker.close()
    await owner.ping()
    await owner.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [("storage_capacity", 7), ("num_storage_units", 1), ("strict_schema", True), ("auto_register", True)],
)
async def test_another_config_of_a_plane_that_is_there_is_refused(cluster: RayCluster, key: str, value: Any) -> None:
    """ValueError that names the key; the plane that is there goes on."""
    first = config()
    owner = build_data_plane_client(first)
    with pytest.raises(ValueError, match=key):
        build_data_plane_client({**first, key: value})
    again = build_data_plane_client(first)  # the same config: joins it
    await again.close()
    await owner.ping()
    await owner.close()


async def test_more_units_than_there_are_is_refused(cluster: RayCluster) -> None:
    """A controller that is there brings its own storage units."""
    with pytest.raises(ValueError, match="num_storage_units"):
        build_data_plane_client(config(num_storage_units=3))


def test_too_few_cpus_are_told_not_waited_for(cluster: RayCluster) -> None:
    """TransferQueue itself would wait for ever, silently."""
    import ray

    parsed = parse_config(base_config())
    with pytest.raises(DataPlaneNotReady, match="CPU"):
        Cluster(parsed, TransferQueueSettings())._begin(ray)


async def test_the_owners_close_ends_the_plane_for_workers(cluster: RayCluster) -> None:
    """A worker in another process sees DataPlaneUnavailable; until then it needs no Ray."""
    owner = build_data_plane_client(config())
    code = f"""
import anyio, sys
from asyncdp import build_data_plane_client
async def main():
    client = build_data_plane_client({owner.attach_config()!r}, bootstrap=False)
    await client.ping()
    import ray
    print(ray.is_initialized(), flush=True)
    await client.close()
anyio.run(main)
"""
    done = await anyio.run_process([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    assert done.stdout.decode().strip() == "False"
    worker = build_data_plane_client(owner.attach_config(), bootstrap=False)
    await worker.ping()
    await owner.close()
    with pytest.raises(DataPlaneUnavailable):
        await worker.ping()
    await worker.close()


def test_the_actors_requirement_is_pinned_where_asked() -> None:
    """Off by default; read from our own installed metadata; a warning and no failure where there is none."""
    parsed = parse_config(base_config())
    assert Cluster(parsed, TransferQueueSettings())._options() == {}
    pinned = Cluster(parsed, TransferQueueSettings(actor_runtime_env=True))
    assert pinned._options() == {"runtime_env": {"pip": ["TransferQueue==0.1.11"]}}
    assert pinned._options() == pinned._options()


def test_without_metadata_the_actors_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransferQueue vendored or moved: a warning."""
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    parsed = parse_config(base_config())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert Cluster(parsed, TransferQueueSettings(actor_runtime_env=True))._options() == {}
    assert len(seen) == 1
