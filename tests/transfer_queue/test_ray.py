"""Beginning, finding and ending a plane in a real Ray cluster."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import anyio
import anyio.to_thread
import pytest
import structlog.testing
import torch

from asyncdp import DataPlaneBadRequest, DataPlaneNotReady, DataPlaneUnavailable, build_data_plane_client, stack
from asyncdp.config import TransferQueueSettings, parse_config
from asyncdp.transports.transfer_queue.cluster.actors import Cluster
from asyncdp.transports.transfer_queue.cluster.ray_connection import RayConnection
from asyncdp.transports.transfer_queue.controller.shipped import by_value
from asyncdp.transports.transfer_queue.private import INFO
from tests.forks.scenes import play
from tests.transfer_queue.another_release import release_without
from tests.transfer_queue.opener import CLUSTER
from tests.transfer_queue.ray_cluster import RayCluster, base_config, start_ray

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def cluster() -> RayCluster:
    """Give the session's Ray cluster, with controller and two storage units, begun anew where a test had to end it."""
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
    [
        ("storage_capacity", 7),
        ("num_storage_units", 1),
        ("strict_schema", True),
        ("auto_register", True),
        ("group_id_pattern", "{i}-{group}"),
    ],
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


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("controller", "polling_mode", False), ("controller", "sampler", "Mine"), ("backend", "storage_backend", "Other")],
)
def test_another_transfer_queue_than_we_need_is_refused(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, section: str, key: str, value: Any
) -> None:
    """ValueError that names what differs; nothing is changed in it."""
    import ray

    stored = ray.get(Cluster._actor(ray).get_config.remote())
    stored[section][key] = value
    monkeypatch.setattr(Cluster, "_stored", lambda *_: stored)
    with pytest.raises(ValueError, match=value if isinstance(value, str) else key):
        build_data_plane_client(config())


class WithoutRegister:
    """A controller of a release that lets no sampler be registered."""

    def __init__(self, actor: Any) -> None:
        """Stand before the real one."""
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        """Have all that it has, but for that."""
        if name == "register_sampler":
            raise AttributeError(name)
        return getattr(self._actor, name)


async def test_a_controller_that_takes_no_sampler(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory runs beside it; who knows only Ray's address finds it."""
    import ray
    from transfer_queue import SequentialSampler

    actor = Cluster._actor(ray)
    ray.get(actor.register_sampler.remote(SequentialSampler()))
    try:
        with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
            patch.setattr(Cluster, "_actor", staticmethod(lambda _ray: WithoutRegister(actor)))
            owner = build_data_plane_client(config())
        assert [line["why"] for line in logs if "why" in line] == [
            "TransferQueue lacks TransferQueueController.register_sampler"
        ]
        told = owner.attach_config()
        assert told["transfer_queue"]["endpoints"].pop("directory")
        del told["transfer_queue"]["endpoints"]
        worker = build_data_plane_client(told, bootstrap=False)
        await owner.register_partition("p", ["x"], 1, ["train"])
        await worker.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert (await worker.claim_meta("p", "train", ["x"], 1)).sample_ids == ["a"]
        await worker.close()
        await owner.close()
    finally:
        with by_value(ray.cloudpickle) as sampler:
            ray.get(actor.register_sampler.remote(sampler))
    await stack(cluster.keeper).ping()


async def test_descriptions_of_servers_that_cannot_be_made_come_from_ray(cluster: RayCluster) -> None:
    """ZMQServerInfo is not as we know it: the actors' own are used, and a log says so."""
    with release_without(INFO), structlog.testing.capture_logs() as logs:
        client = build_data_plane_client(config())
        assert any("ZMQServerInfo" in str(line.get("calls")) for line in logs)
        await client.register_partition("p", ["x"], 1, ["train"])
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert (await client.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]
        await client.close()


@pytest.mark.parametrize("taken", ["name", "cpus"])
async def test_of_two_bootstraps_at_once_one_joins_the_other(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """When it looked there was no controller; now its name is taken, or its CPUs are."""
    looks: list[Any] = [None]
    real = Cluster._actor
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "_actor", staticmethod(lambda ray: looks.pop() if looks else real(ray)))
        if taken == "name":
            patch.setattr(Cluster, "_check_cpus", lambda *_: None)
        client = build_data_plane_client(config())
    assert client.attach_config()["transfer_queue"]["endpoints"] == cluster.endpoints.to_config()
    await client.ping()
    await client.close()
    await stack(cluster.keeper).ping()


@pytest.mark.parametrize(
    ("what", "becomes"), [("GetTimeoutError", DataPlaneNotReady), ("ActorDiedError", DataPlaneUnavailable)]
)
def test_actors_that_do_not_start_are_told_typed(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, what: str, becomes: type[Exception]
) -> None:
    """Not as an exception of Ray's; its own is the cause."""
    import ray

    def fails(*_: Any) -> Any:
        raise getattr(ray.exceptions, what)

    monkeypatch.setattr(Cluster, "_join_or_begin", fails)
    with pytest.raises(becomes) as caught:
        build_data_plane_client(config())
    assert type(caught.value.__cause__).__name__ == what


async def test_the_ray_that_is_there_is_used_where_none_is_named(cluster: RayCluster) -> None:
    """RAY_ADDRESS, or a Ray of ``ray start``, as ray.init() itself would; no second one is started."""
    import ray

    address = ray.get_runtime_context().gcs_address
    code = f"""
import anyio
from asyncdp import build_data_plane_client
client = build_data_plane_client({config()!r})
print(client.attach_config()["controller_address"])
anyio.run(client.close)
"""
    env = {**os.environ, "RAY_ADDRESS": address}
    done = await anyio.run_process([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=env)
    assert done.stdout.decode().split() == [address]
    await stack(cluster.keeper).ping()


async def test_attaching_without_ray_asks_for_what_it_must_be_told(cluster: RayCluster) -> None:
    """U19: the Ray that runs on this machine may be anybody's. Every error is of the tree, and names the key."""
    import ray

    owner = build_data_plane_client(config())
    address = ray.get_runtime_context().gcs_address
    told = {**owner.attach_config(), "controller_address": None}
    own = {**told["transfer_queue"], "endpoints": None}
    code = f"""
import anyio, os
from asyncdp import DataPlaneError, build_data_plane_client

async def attach(more, address=""):
    if address:
        os.environ["RAY_ADDRESS"] = address
    try:
        async with build_data_plane_client({{**{told!r}, **more}}, bootstrap=False) as client:
            await client.ping()
            print("ok")
    except DataPlaneError as err:
        print(type(err).__name__, str(err).partition(" ")[0])

anyio.run(attach, {{"transfer_queue": {own!r}}})
anyio.run(attach, {{}})
anyio.run(attach, {{"transfer_queue": {own!r}}}, {address!r})
"""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = await anyio.run_process([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=env)
    first, by_endpoints, by_environment = done.stdout.decode().splitlines()
    assert first == "DataPlaneBadRequest controller_address:"
    assert (by_endpoints, by_environment) == ("ok", "ok")
    await owner.close()


@pytest.mark.parametrize("raised", [ConnectionError, RuntimeError, TimeoutError, AssertionError, Exception])
def test_whatever_ray_raises_is_of_the_tree(raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """U19: connecting to a Ray that does not answer is DataPlaneUnavailable, which says where it was looked for."""
    import ray

    def fail(*_: object, **__: object) -> None:
        raise raised("no")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(DataPlaneUnavailable, match=r"at 10\.0\.0\.1:6379$") as caught:
        RayConnection("10.0.0.1:6379").connect()
    assert type(caught.value.__cause__) is raised
    with pytest.raises(DataPlaneBadRequest, match=r"^controller_address: required"):
        RayConnection(None).connect()


@pytest.mark.timeout(600)
async def test_a_program_on_ray_that_forks(cluster: RayCluster) -> None:
    """U3: where the program is connected to Ray itself; children that end by sys.exit do end, and it goes on."""
    owner = build_data_plane_client(config())
    told = owner.attach_config()
    del told["transfer_queue"]["endpoints"]
    names = ("ends", "inside", "own")
    *said, small, last = await anyio.to_thread.run_sync(lambda: play(told, *names))
    assert [*said, last] == [f"played {name}" for name in names]
    assert small == "read small rows"
    await owner.close()


async def test_another_ray_than_this_process_is_connected_to_is_refused(cluster: RayCluster) -> None:
    """Else the plane would be begun, or found, in a Ray that nobody named."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    for address in (f"{host}:1", f"198.51.100.1:{port}"):
        with pytest.raises(ValueError, match="controller_address"):
            build_data_plane_client(config(controller_address=address))
        worker = build_data_plane_client(config(controller_address=address), bootstrap=False)
        with pytest.raises(DataPlaneBadRequest, match="controller_address"):
            await worker.ping()
        await worker.close()
    for address in ("auto", f"localhost:{port}"):
        owner = build_data_plane_client(config(controller_address=address))
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


async def test_actors_whose_classes_moved_are_started_by_transfer_queue_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its public init and close, with a warning; a second start finds no globals in its way."""
    import transfer_queue

    await anyio.to_thread.run_sync(CLUSTER.close)  # one controller per Ray
    ray = start_ray()
    try:
        monkeypatch.setitem(sys.modules, "transfer_queue.storage.simple_storage", None)
        for _ in range(2):
            with pytest.warns(UserWarning, match="started by its init"):
                owner = build_data_plane_client(base_config(transfer_queue={"actor_runtime_env": True}))
            worker = build_data_plane_client(owner.attach_config(), bootstrap=False)
            await owner.register_partition("p", ["x"], 1, ["train"])
            await worker.put_samples(["a"], "p", {"x": torch.ones(1)})
            assert (await owner.get_samples(["a"], "p", ["x"]))["x"].tolist() == [1.0]
            await worker.close()
            await owner.close()
            assert Cluster._actor(ray) is None
    finally:
        transfer_queue.close()
        ray.shutdown()


async def test_an_owner_is_closed_after_another_ray_was_started() -> None:
    """Its actors ended with the Ray that the program shut down, so there is nothing left to end."""
    await anyio.to_thread.run_sync(CLUSTER.close)  # one controller per Ray
    ray = start_ray()
    try:
        owner = build_data_plane_client(base_config())
        ray.shutdown()
        ray = start_ray()
        await owner.close()
    finally:
        ray.shutdown()
