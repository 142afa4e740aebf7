"""Starts, finds and stops the actors of a TransferQueue in a Ray cluster.

TransferQueue's own ``init`` and ``close`` are not used: their module globals prevent a second start after the
controller died, ``init`` ignores the config of an existing controller, and ``close`` stops it for all clients.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import time
import warnings
from typing import TYPE_CHECKING, Any

from asyncdp.errors import DataPlaneNotReady, DataPlaneUnavailable

from ..controller.shipped import by_value
from ..endpoints import Endpoints, Server, address_towards
from ..mooncake.master import Master, check_import
from ..mooncake.unit import PROTOCOL, given_settings, transport_settings
from .ray_connection import RayConnection

if TYPE_CHECKING:
    from asyncdp.config import Config, TransferQueueSettings

__all__ = ["Cluster"]

#: Actor name and Ray namespace under which TransferQueue looks for its controller.
NAME, RAY_NAMESPACE = "TransferQueueController", "transfer_queue"
#: TransferQueue's names of the backends.
MOONCAKE = "MooncakeStore"
BACKENDS = {"simple": "SimpleStorage", "mooncake_cpu": MOONCAKE}
#: Seconds that storage units have to shut down before they are killed.
SHUTDOWN_S = 5.0
#: Seconds to wait until Ray reports the CPUs of actors that just ended as free.
FREED_S = 3.0


class Cluster:
    """Manages TransferQueue's actors in one Ray cluster. All methods block.

    Args:
        config: Config of the transport; ``controller_address`` is Ray's address.
        settings: The transport's own section of the config.

    Attributes:
        started: Whether this object started the actors, so that its :meth:`stop` ends them.
        lacking: Name of the missing call of TransferQueue if our sampler could not be installed on the controller.
    """

    def __init__(self, config: Config, settings: TransferQueueSettings) -> None:
        """Store the config; Ray is not contacted yet."""
        self._config = config
        self._settings = settings
        self._ray = RayConnection(config.controller_address)
        self._controller: Any = None
        self._units: list[Any] = []
        self._public: Any = None
        self._master: Master | None = None
        self.started = False
        self.lacking = ""

    @property
    def address(self) -> str | None:
        """Ray's address, for use by another process."""
        return self._ray.address

    # -- finding

    def check_named(self) -> None:
        """Raise if no Ray to attach to is configured; see :meth:`RayConnection.check_named`."""
        self._ray.check_named()

    def find(self) -> Endpoints:
        """Ask Ray for the addresses of the controller and its storage units.

        Raises:
            DataPlaneUnavailable: Ray does not answer, or has no controller.
        """
        ray = self._ray.connect()
        self._prepare(ray)
        return self._endpoints(ray, self._running(ray))

    def _running(self, ray: Any) -> Any:
        controller = self._actor(ray)
        if controller is None:
            msg = f"no TransferQueue controller runs in the Ray cluster at {self.address}"
            raise DataPlaneUnavailable(msg, blames_port=False)
        return controller

    @staticmethod
    def _actor(ray: Any) -> Any:
        try:
            return ray.get_actor(NAME, namespace=RAY_NAMESPACE)
        except ValueError:
            return None

    def _stored(self, ray: Any, controller: Any) -> Any:
        """Return the config stored on the controller; it is stored once all actors have started."""
        until = time.monotonic() + self._settings.bootstrap_timeout_s
        while True:
            try:
                stored = ray.get(controller.get_config.remote(), timeout=max(0.1, until - time.monotonic()))
            except ray.exceptions.RayError as err:
                msg = "the TransferQueue controller does not answer"
                raise DataPlaneUnavailable(msg, cause=err) from err
            if stored is not None:
                return stored
            if time.monotonic() > until:
                msg = "the TransferQueue controller is still waiting for its storage units"
                raise DataPlaneNotReady(msg)
            time.sleep(0.1)

    def described(self) -> dict[str, Any]:
        """Return TransferQueue's descriptions of its servers, by id."""
        ray = self._ray.connect()
        stored = self._stored(ray, self._running(ray))
        units = stored.backend.get("SimpleStorage", {}).get("zmq_info", {})
        infos = (stored.controller.zmq_info, *units.values())
        return {str(info.id): info for info in infos}

    def _endpoints(self, ray: Any, controller: Any) -> Endpoints:
        from omegaconf import OmegaConf

        stored = self._stored(ray, controller)
        backend, wanted = stored.backend.storage_backend, BACKENDS[self._config.backend]
        if backend != wanted:
            msg = f"backend: the TransferQueue that is there runs {backend!r}, not {wanted!r}"
            raise ValueError(msg)
        if wanted == MOONCAKE:
            told = stored.backend[MOONCAKE].get("asyncdp")
            if told is None:
                msg = "backend: asyncdp has not started the Mooncake of the TransferQueue that is there"
                raise ValueError(msg)
            plain = OmegaConf.to_container(told)
            return Endpoints.from_config({"controller": _server(stored.controller.zmq_info).to_config(), **plain})
        units = [_server(info) for info in stored.backend.SimpleStorage.zmq_info.values()]
        return Endpoints(_server(stored.controller.zmq_info), tuple(units))

    # -- starting

    def start(self) -> Endpoints:
        """Start controller and storage units, or find the running ones, and install our directory on the controller.

        Raises:
            DataPlaneNotReady: Ray has too few free CPUs, for which a start could wait for ever; or the actors did not
                start within ``bootstrap_timeout_s``.
            DataPlaneUnavailable: No Ray answers, or an actor ended while it started.
            ValueError: The running controller has another backend, or a sampler that cannot be replaced.
        """
        ray = self._ray.connect(start_with_cpus=self._config.num_storage_units + 2)
        try:
            self._prepare(ray)
            return self._join_or_begin(ray)
        except ray.exceptions.GetTimeoutError as err:
            self.stop()
            msg = f"TransferQueue's actors did not answer in {self._settings.bootstrap_timeout_s:g} s"
            raise DataPlaneNotReady(msg, cause=err) from err
        except ray.exceptions.RayError as err:
            self.stop()
            msg = "an actor of TransferQueue's ended while it started"
            raise DataPlaneUnavailable(msg, cause=err) from err
        except BaseException:
            self.stop()
            raise

    def _join_or_begin(self, ray: Any) -> Endpoints:
        if self._actor(ray) is None:
            try:
                return self._begin(ray)
            except (DataPlaneNotReady, ValueError):
                # Another process may have started at the same time and taken the name or the CPUs.
                if self.started or self._actor(ray) is None:
                    raise
        return self._join(ray, self._running(ray))

    def _join(self, ray: Any, controller: Any) -> Endpoints:
        stored = self._stored(ray, controller)
        sampler = stored.controller.sampler
        if sampler != "SequentialSampler":
            msg = f"the TransferQueue that is there runs the sampler {sampler!r}; asyncdp's would replace it"
            raise ValueError(msg)
        if not stored.controller.get("polling_mode", True):
            msg = "polling_mode: it is off in the running TransferQueue, so a request that waits blocks all others"
            raise ValueError(msg)
        endpoints = self._endpoints(ray, controller)
        try:
            register = controller.register_sampler
        except AttributeError:
            self.lacking = "TransferQueueController.register_sampler"
            return endpoints
        with by_value(ray.cloudpickle) as sampler:
            ray.get(register.remote(sampler), timeout=self._settings.bootstrap_timeout_s)
        return endpoints

    def _begin(self, ray: Any) -> Endpoints:
        self._check_cpus(ray)
        try:
            from transfer_queue.controller import TransferQueueController
            from transfer_queue.storage.simple_storage import SimpleStorageUnit
        except ImportError as err:
            if self._config.backend == "mooncake_cpu":
                raise
            return self._begin_publicly(ray, err)

        options = self._options()
        with by_value(ray.cloudpickle) as sampler:
            self._controller = TransferQueueController.options(name=NAME, namespace=RAY_NAMESPACE, **options).remote(
                sampler=sampler, polling_mode=True
            )
        self.started = True
        if self._config.backend == "mooncake_cpu":
            return self._begin_mooncake(ray, options)
        storage = {"num_data_storage_units": self._config.num_storage_units, "total_storage_size": None}
        self._units = [
            SimpleStorageUnit.options(scheduling_strategy="SPREAD", **options).remote(config=storage)
            for _ in range(self._config.num_storage_units)
        ]
        infos = ray.get(
            [actor.get_zmq_server_info.remote() for actor in (self._controller, *self._units)],
            timeout=self._settings.bootstrap_timeout_s,
        )
        units = {**storage, "zmq_info": {info.id: info for info in infos[1:]}}
        self._store_config(ray, infos[0], {"storage_backend": "SimpleStorage", "SimpleStorage": units})
        return Endpoints(_server(infos[0]), tuple(_server(info) for info in infos[1:]))

    def _prepare(self, ray: Any) -> None:
        """Set up this process for Mooncake, before TransferQueue imports it; raise ImportError if it cannot be."""
        if self._config.backend == "mooncake_cpu":
            transport_settings(ray.util.get_node_ip_address())
            check_import()

    def _begin_mooncake(self, ray: Any, options: dict[str, Any]) -> Endpoints:
        """Start Mooncake's master here, and the units that hold its segments as actors."""
        timeout_s = self._settings.bootstrap_timeout_s
        info = ray.get(self._controller.get_zmq_server_info.remote(), timeout=timeout_s)
        controller = _server(info)
        self._master = Master(address_towards(controller))
        segment, buffer = self._config.global_segment_size, self._config.local_buffer_size
        kind = importlib.import_module("asyncdp.transports.transfer_queue.mooncake.unit")
        ray.cloudpickle.register_pickle_by_value(kind)
        try:
            actor = ray.remote(num_cpus=1)(kind.MooncakeUnit).options(scheduling_strategy="SPREAD", **options)
            plane = {PROTOCOL: "tcp", **given_settings()}
            self._units = [
                actor.remote(self._master.address, segment, buffer, None, plane)
                for _ in range(self._config.num_storage_units)
            ]
        finally:
            ray.cloudpickle.unregister_pickle_by_value(kind)
        units = [Server(*told) for told in ray.get([one.get_server.remote() for one in self._units], timeout=timeout_s)]
        told = {"master": self._master.address, "buffer_bytes": buffer, "protocol": plane[PROTOCOL]}
        endpoints = Endpoints(controller, tuple(units), mooncake=told)
        ours = {key: value for key, value in endpoints.to_config().items() if key != "controller"}
        settings = {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self._master.address,
            "global_segment_size": segment,
            "local_buffer_size": buffer,
            "asyncdp": ours,
        }
        self._store_config(ray, info, {"storage_backend": MOONCAKE, MOONCAKE: settings})
        return endpoints

    def _store_config(self, ray: Any, controller: Any, backend: dict[str, Any]) -> None:
        from omegaconf import OmegaConf

        stored = OmegaConf.create(
            {
                "metrics": {"enabled": False, "port": 0},
                "controller": {"sampler": "SequentialSampler", "polling_mode": True, "zmq_info": controller},
                "backend": backend,
            },
            flags={"allow_objects": True},
        )
        ray.get(self._controller.store_config.remote(stored), timeout=self._settings.bootstrap_timeout_s)

    def _check_cpus(self, ray: Any) -> None:
        """Raise DataPlaneNotReady if Ray has too few CPUs to schedule the actors."""
        wanted = self._config.num_storage_units + 1
        until = time.monotonic() + (FREED_S if ray.cluster_resources().get("CPU", 0) >= wanted else 0.0)
        while (free := int(ray.available_resources().get("CPU", 0))) < wanted:
            if time.monotonic() >= until:
                msg = f"Ray has {free} free CPUs; TransferQueue needs {wanted}, one per actor"
                raise DataPlaneNotReady(msg, retry_after_s=1.0)
            time.sleep(0.1)

    def _begin_publicly(self, ray: Any, why: ImportError) -> Endpoints:
        """Start the actors by TransferQueue's own ``init``, for releases that moved their classes."""
        import transfer_queue
        from omegaconf import OmegaConf

        text = f"TransferQueue's actors are started by its init, without the options asked for: {why}"
        warnings.warn(text, stacklevel=2)
        transfer_queue.close()  # resets the globals that an earlier init of a dead controller left
        storage = {"num_data_storage_units": self._config.num_storage_units, "total_storage_size": None}
        settings = {
            "controller": {"sampler": "SequentialSampler", "polling_mode": True},
            "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage},
        }
        transfer_queue.init(OmegaConf.create(settings, flags={"allow_objects": True}))
        self._public = transfer_queue
        self.started = True
        return self._join(ray, self._actor(ray))

    def _options(self) -> dict[str, Any]:
        """Return the Ray options of the actors besides their names."""
        if not self._settings.actor_runtime_env:
            return {}
        try:
            version = importlib.metadata.version("TransferQueue")
        except importlib.metadata.PackageNotFoundError:
            warnings.warn("TransferQueue has no installed metadata to pin: actors run as they are", stacklevel=2)
            return {}
        return {"runtime_env": {"pip": [f"TransferQueue=={version}"]}}

    # -- stopping

    def stop(self) -> None:
        """Stop the units, the controller and Ray, each only if this object started it."""
        import ray

        if self._public is not None:
            self._public.close()
            self._public = None
        if self.started and ray.is_initialized():
            try:
                ray.get([unit.shutdown.remote() for unit in self._units], timeout=SHUTDOWN_S)
            except Exception as err:  # noqa: BLE001 - dead, or not listening: killed below
                del err
            for actor in (*self._units, self._controller):
                if actor is not None:
                    with contextlib.suppress(ray.exceptions.RayError):  # it ended with a Ray that was shut down since
                        ray.kill(actor)
        if self._master is not None:
            self._master.stop()
            self._master = None
        self.started = False
        self._units, self._controller = [], None
        self._ray.stop()


def _server(info: Any) -> Server:
    return Server(str(info.id), str(info.ip), {str(name): int(port) for name, port in info.ports.items()})
