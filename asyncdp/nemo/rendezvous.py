"""Where a plane is: drivers say so, and workers that were given the driver's own config look it up.

NeMo-RL hands each worker the config that the driver had before it started the plane, without an address. A driver
therefore announces the address in three places, and a worker looks at them in this order: in its own process; in Ray,
under the Ray job of both; in a folder of this user, for other processes of the machine. There, the plane of the nearest
ancestor process is taken; else the only one that there is. Where several qualify, nothing is guessed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.process.private_files import check_owner, private_folder, read_private, write_private

__all__ = ["Plane", "announce", "find"]


class Plane(NamedTuple):
    """What the configs of a driver and its workers have in common: the impl, and the plane's namespace."""

    impl: str
    namespace: str


#: Addresses of the planes that this process announced, or inherited by a fork.
_HERE: dict[Plane, list[str]] = {}


def announce(plane: Plane, address: str) -> Callable[[], None]:
    """Make the address of a plane known; return a function that withdraws it, in this process only.

    Warns:
        UserWarning: Other processes will not find the plane, for the reason given.
    """
    _HERE.setdefault(plane, []).append(address)
    undo: list[Callable[[], None]] = []
    if plane.impl != "memory":
        for tell in (_tell_ray, _tell_machine):
            try:
                undo.append(tell(plane, address))
            except Exception as err:  # noqa: BLE001 - the plane itself works
                warnings.warn(f"workers may not find the plane at their driver's config: {err}", stacklevel=4)
    me = os.getpid()

    def withdraw() -> None:
        if os.getpid() != me or address not in _HERE.get(plane, ()):
            return
        _HERE[plane].remove(address)
        for one in undo:
            with suppress(Exception):  # Ray has ended, or the folder is gone
                one()

    return withdraw


def find(plane: Plane) -> str | None:
    """Return the address of the plane of this process' driver; None if no driver announced one.

    Raises:
        DataPlaneUnavailable: Several planes qualify; the message says how to name one.
    """
    for place, found in _places(plane):
        addresses = list(dict.fromkeys(found))
        if len(addresses) == 1:
            return addresses[0]
        if addresses:
            msg = (
                f"{len(addresses)} planes of impl {plane.impl!r} and namespace {plane.namespace!r} {place}; give"
                " workers controller_address or the driver's attach_config(), or each plane a namespace"
            )
            raise DataPlaneUnavailable(msg, blames_port=False)
    return None


def _places(plane: Plane) -> Iterator[tuple[str, list[str]]]:
    yield "are in this process", _HERE.get(plane, [])
    if plane.impl == "memory":
        return
    yield "are of this Ray job", _told_by_ray(plane)
    records = _records(plane)
    yield "are of the process that started this one", _of_ancestor(records)
    yield "are on this machine", [address for _, address in records]


# --- Ray ------------------------------------------------------------------------------------------------------------


def _ray_kv(plane: Plane) -> tuple[Any, str] | None:
    """Return Ray's key-value store and the prefix of this job's keys; None outside of Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray.experimental import internal_kv

    job = ray.get_runtime_context().get_job_id()
    return internal_kv, f"asyncdp.plane/{job}/{plane.impl}/{plane.namespace}/"


def _tell_ray(plane: Plane, address: str) -> Callable[[], None]:
    store = _ray_kv(plane)
    if store is None:
        return lambda: None
    kv, prefix = store
    key = f"{prefix}{uuid.uuid4().hex}".encode()
    kv._internal_kv_put(key, address.encode())  # noqa: SLF001 - Ray has no public store of its own
    return lambda: kv._internal_kv_del(key)  # noqa: SLF001


def _told_by_ray(plane: Plane) -> list[str]:
    store = _ray_kv(plane)
    if store is None:
        return []
    kv, prefix = store
    found = [kv._internal_kv_get(key) for key in kv._internal_kv_list(prefix.encode())]  # noqa: SLF001
    return [address.decode() for address in found if address is not None]


# --- the machine ----------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"asyncdp-{os.geteuid()}-planes"


def _tell_machine(plane: Plane, address: str) -> Callable[[], None]:
    folder = _folder()
    private_folder(folder)
    file = folder / f"{uuid.uuid4().hex}.json"
    record = {"plane": list(plane), "address": address, "process": _process(os.getpid()), "pids": _pid_namespace()}
    write_private(file, json.dumps(record))
    return lambda: file.unlink(missing_ok=True)


def _records(plane: Plane) -> list[tuple[int, str]]:
    """Return pid and address of each plane that a living process of this user announced."""
    folder = _folder()
    try:
        check_owner(folder.lstat(), str(folder))
        files = sorted(folder.glob("*.json"))
    except OSError:
        return []
    found = []
    for file in files:
        try:
            record = json.loads(read_private(file))
            if record["pids"] != _pid_namespace():
                continue
            pid = record["process"][0]
            if record["process"] != _process(pid):
                file.unlink(missing_ok=True)  # its process ended without closing the plane
            elif record["plane"] == list(plane):
                found.append((pid, record["address"]))
        except (OSError, ValueError, LookupError, TypeError):  # withdrawn meanwhile, or of another release
            continue
    return found


def _of_ancestor(records: list[tuple[int, str]]) -> list[str]:
    """Return the addresses that the nearest ancestor of this process announced."""
    pid = os.getpid()
    while pid:  # a driver may be the first process of its container
        if mine := [address for owner, address in records if owner == pid]:
            return mine
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return []
    return []


def _process(pid: int) -> list[int]:
    """Return the pid and the start time of a process, in clock ticks since the machine started; 0: it is not there."""
    try:
        return [pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])]
    except OSError:
        return [pid, 0]


def _pid_namespace() -> int:
    """Return what distinguishes machines and containers, whose pids mean different processes."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
