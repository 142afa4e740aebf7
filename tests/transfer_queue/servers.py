"""TransferQueue's own controller and storage units without Ray: the same classes, over the same sockets."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TQ_NUM_THREADS", "2")

import psutil

from asyncdp.transports.transfer_queue.endpoints import Endpoints, Server
from tests.transfer_queue.ray_cluster import base_config

__all__ = ["Servers", "config_for", "server_of"]


def server_of(info: Any) -> Server:
    """Turn TransferQueue's description of a server into ours."""
    return Server(info.id, info.ip, dict(info.ports))


def config_for(endpoints: Endpoints, namespace: str, **more: Any) -> dict[str, Any]:
    """Return a config for clients of these servers."""
    own = {"namespace": namespace, "endpoints": endpoints.to_config(), **more.pop("transfer_queue", {})}
    return base_config(**more, transfer_queue=own)


def _stay_here(module: Any) -> None:
    """Have a server of TransferQueue listen on loopback; it would ask Ray for the machine's address."""
    module.get_node_ip_address = lambda: "127.0.0.1"


def _controller(pipe: Any, sampler: bytes | None) -> None:
    import cloudpickle
    from transfer_queue import controller
    from transfer_queue.controller import TransferQueueController

    _stay_here(controller)

    kind = TransferQueueController.__ray_metadata__.modified_class
    made = kind(polling_mode=True) if sampler is None else kind(sampler=cloudpickle.loads(sampler), polling_mode=True)
    pipe.send(server_of(made.get_zmq_server_info()))
    _rest(pipe)


def _unit(pipe: Any, size: int | None) -> None:
    from transfer_queue.storage import simple_storage
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    _stay_here(simple_storage)
    kind = SimpleStorageUnit.__ray_metadata__.modified_class
    made = kind(config={"num_data_storage_units": 1, "total_storage_size": size})
    pipe.send(server_of(made.get_zmq_server_info()))
    _rest(pipe)


def _rest(pipe: Any) -> None:
    """Live until the parent closes its end, or dies."""
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)


def pickled_sampler() -> bytes:
    """Return the sampler as it is sent to a controller."""
    import cloudpickle

    from asyncdp.transports.transfer_queue.controller.shipped import by_value

    with by_value(cloudpickle) as sampler:
        blob: bytes = cloudpickle.dumps(sampler)
    return blob


class Servers:
    """A controller and its storage units, each in a process of its own that may be killed and paused.

    Args:
        units: Storage units.
        size: Rows that each holds at most.
        ours: Whether the controller runs our directory.
    """

    def __init__(self, units: int = 2, size: int | None = None, *, ours: bool = True) -> None:
        """Start them; the first time takes some seconds, since one process imports TransferQueue for all others."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["transfer_queue"])
        self.processes: dict[str, Any] = {}
        self._pipes: list[Any] = []
        controller = self._start(_controller, pickled_sampler() if ours else None)
        self.endpoints = Endpoints(controller, tuple(self._start(_unit, size) for _ in range(units)))

    def _start(self, target: Callable[..., None], argument: Any) -> Server:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, argument), daemon=True)
        process.start()
        theirs.close()
        assert mine.poll(60), "a server did not start"
        server: Server = mine.recv()
        self.processes[server.id] = process
        self._pipes.append(mine)
        return server

    def signal(self, server: Server, number: int) -> None:
        """Send a signal to one server's process."""
        os.kill(self.processes[server.id].pid, number)

    def pause(self, server: Server) -> None:
        """Stop a server where it is; returns when it has stopped."""
        self.signal(server, signal.SIGSTOP)
        process = psutil.Process(self.processes[server.id].pid)
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def resume(self, server: Server) -> None:
        """Let a stopped server go on."""
        self.signal(server, signal.SIGCONT)

    def kill(self, server: Server) -> float:
        """Kill a server; returns when, by the monotonic clock."""
        now = time.monotonic()
        self.signal(server, signal.SIGKILL)
        self.processes[server.id].join(5)
        return now

    def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
        for process in self.processes.values():
            process.join(5)
        for pipe in self._pipes:
            pipe.close()
