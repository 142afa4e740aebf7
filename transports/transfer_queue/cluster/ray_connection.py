"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from typing import Any

from asyncdp.errors import DataPlaneBadRequest, DataPlaneUnavailable
from asyncdp.process.forks import never_destroy, on_fork, skip_exit_handlers
from asyncdp.process.ray_niceness import workers_not_niced
from asyncdp.settings.urls import without_password

__all__ = ["RayConnection"]

#: Where Ray keeps another native object.
_KV, _KV_CLIENT = ".experimental.internal_kv", "global_gcs_client"


class RayConnection:
    """Connects this process to a Ray cluster, once. All methods block.

    Args:
        address: Ray's address from the config; None: the present Ray, whatever its address.
    """

    def __init__(self, address: str | None) -> None:
        """Store the address; Ray is not contacted yet."""
        self._address = address
        self._is_ours = False

    @property
    def address(self) -> str | None:
        """Ray's address, for use by another process."""
        import ray

        if self._address in (None, "local") and ray.is_initialized():
            found: str = ray.get_runtime_context().gcs_address
            return found
        return self._address

    def check_named(self) -> None:
        """Raise if no Ray is named: attaching to any Ray on this machine could reach another user's.

        Raises:
            DataPlaneBadRequest: Neither config nor environment names a Ray, and this process is connected to none.
        """
        import ray

        if self._address is None and not os.environ.get("RAY_ADDRESS") and not ray.is_initialized():
            msg = (
                "controller_address: required to attach where transfer_queue.endpoints is not given; the owner's"
                " attach_config() has both. Or set RAY_ADDRESS, or connect this process to the owner's Ray (ray.init)"
            )
            raise DataPlaneBadRequest(msg, field="controller_address")

    def connect(self, *, start_with_cpus: int | None = None) -> Any:
        """Return the module ``ray`` after connecting; with ``start_with_cpus``, start a Ray if there is none.

        Raises:
            DataPlaneBadRequest: The process is connected to a Ray with another address, or no Ray to attach to is
                named.
            DataPlaneUnavailable: No Ray answers.
        """
        import ray

        on_fork(self)
        if ray.is_initialized():
            there = self._address and str(ray.get_runtime_context().gcs_address)
            if self._address and there and _differ(self._address, there):
                wanted = without_password(self._address)
                msg = f"controller_address: this process is connected to the Ray at {there}, not {wanted}"
                raise DataPlaneBadRequest(msg, field="controller_address")
            return ray
        if start_with_cpus is None:
            self.check_named()
        # Ray's worker logs on this process's stderr contain nothing that a typed error does not say.
        quiet = {"log_to_driver": False, "configure_logging": False}
        try:
            if self._address is None and start_with_cpus is not None:
                self._is_ours = not self._joined(ray, start_with_cpus, quiet)
            else:
                ray.init(address=self._address or "auto", **quiet)
        except Exception as err:  # Ray raises many kinds, Exception itself among them
            told = without_password(self._address or os.environ.get("RAY_ADDRESS") or "the default address")
            msg = f"no Ray cluster answers at {told}"
            raise DataPlaneUnavailable(msg, cause=err) from err
        return ray

    @staticmethod
    def _joined(ray: Any, cpus: int, quiet: dict[str, Any]) -> bool:
        """Connect to the Ray of ``RAY_ADDRESS`` or ``ray start``, or start one; return whether it was running."""
        try:
            with workers_not_niced():
                ray.init(include_dashboard=False, num_cpus=cpus, **quiet)
        except ValueError:  # a Ray is running, for which num_cpus cannot be given
            ray.init(**quiet)
            return True
        return False

    def after_fork(self) -> None:
        """Keep Ray from acting in a child at its end: it would wait for threads that only the parent has, for ever.

        What Ray has begun is the parent's to end; the destructors of its native objects crash in a child; and its exit
        handler in C++ waits for a thread as well.
        """
        modules = (sys.modules.get(f"ray{name}") for name in ("", "._private.worker", "._private.state", _KV))
        ray, worker, state, kv = modules
        if ray is None:
            return
        atexit.unregister(ray.shutdown)
        node = getattr(worker, "_global_node", None)
        getattr(node, "all_processes", {}).clear()
        native = getattr(worker, "global_worker", None), getattr(state, "state", None), getattr(kv, _KV_CLIENT, None)
        for held in (node, *native):
            if held is not None:
                never_destroy(held)
        skip_exit_handlers()

    def stop(self) -> None:
        """Shut Ray down if this object started it."""
        if self._is_ours:
            import ray

            self._is_ours = False
            ray.shutdown()


def _differ(told: str, there: str) -> bool:
    """Whether two addresses certainly belong to different Rays; names like ``auto`` and client addresses never do."""
    (host, _, port), (real_host, _, real_port) = told.rpartition(":"), there.rpartition(":")
    if "://" in told or not port.isdigit():
        return False
    if port != real_port:
        return True
    addresses = _addresses(host)
    return addresses.isdisjoint(_addresses(real_host)) and not any(one.startswith(("127.", "::1")) for one in addresses)


def _addresses(host: str) -> set[str]:
    """Return the IP addresses of a host."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return {host}
