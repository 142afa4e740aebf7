"""One Ray cluster with one TransferQueue for a whole test session."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

from asyncdp.process.ray_niceness import workers_not_niced
from asyncdp.transports.transfer_queue.endpoints import Endpoints

__all__ = ["LOOPBACK", "RayCluster", "base_config", "start_ray"]


#: Where Ray and all its actors listen, as far as Ray lets itself be told; it takes 127.0.0.1 for the network's address.
LOOPBACK = "127.0.0.2"
#: Its node gives up on itself after 30 s, which are few on a busy machine.
TRIES = 3
#: Seconds for TransferQueue's actors, each of which imports torch: more than 240 where others have the processors, and
#: less than a test on Ray may take.
ACTORS_S = 600.0


def start_ray(**more: Any) -> Any:
    """Start a small Ray on this machine and return it."""
    import ray

    for left in reversed(range(TRIES)):
        try:
            with workers_not_niced():
                ray.init(
                    num_cpus=4,
                    include_dashboard=False,
                    object_store_memory=78643200,
                    _node_ip_address=LOOPBACK,
                    log_to_driver=False,
                    **more,
                )
        except Exception:
            ray.shutdown()  # it may be half there
            if not left:
                raise
        else:
            break
        # What it left open is closed here, else in some test, whose failure that would be. The error, which held all of
        # it, is gone by now.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return ray


def base_config(**more: Any) -> dict[str, Any]:
    """Return a config for a plane on the Ray that this process is connected to."""
    return {
        "enabled": True,
        "impl": "transfer_queue",
        "backend": "simple",
        "storage_capacity": 1 << 20,
        "num_storage_units": 2,
        "claim_meta_poll_interval_s": 0.01,
        "global_segment_size": 1,
        "local_buffer_size": 1,
        **more,
    }


class RayCluster:
    """Ray, and a controller with two storage units in it, started by a client of this transport."""

    def __init__(self) -> None:
        """Start both; blocks for 10 to 60 s, on a busy machine for minutes."""
        from asyncdp.transports.transfer_queue import TQTransport

        self._ray = start_ray()
        self.keeper = TQTransport(base_config(transfer_queue={"namespace": "keeper", "bootstrap_timeout_s": ACTORS_S}))
        self.endpoints = Endpoints.from_config(self.keeper.attach_config()["transfer_queue"]["endpoints"])

    def close(self) -> None:
        """End the actors, then Ray."""
        asyncio.run(self.keeper.close())
        self._ray.shutdown()
