"""Encoding of requests to the directory and of its answers, and their dispatch.

All state is in a mapping that is called *home* here. A home without a directory belongs to a plane that is not open.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from asyncdp.transports.directory.partition import Refused

from .units import UnitDirectory

__all__ = ["ARGUMENT", "LEAVES_GARBAGE", "VERSION", "answer"]

#: Name of the argument that carries a request to TransferQueue's controller and of the metadata with its answer; also
#: the key under which a home stores its directory.
ARGUMENT = "asyncdp"
#: Version of requests and answers. Both sides send it; a different version is refused.
VERSION = 2
#: Requests whose answer may name garbage for the client to clear: {name: position of the op_id in its arguments}.
LEAVES_GARBAGE = {"publish": 2, "abort": 0, "clear": 2, "drop": 1}


def answer(home: dict[str, Any], request: bytes) -> bytes:
    """Execute an encoded request ``(op, arguments, tickets of cleared garbage)`` and return the encoded answer.

    Returns:
        ``("ok", epoch, value[, garbage])``, ``("refused", epoch, (error, message, info))`` or
        ``("failed", None, text)``.
    """
    told: tuple[Any, ...]
    try:
        op, args, swept = pickle.loads(request)  # noqa: S301 - TransferQueue unpickles whatever reaches it as well
        told = _serve(home, op, args, swept)
    except Refused as err:
        directory = home.get(ARGUMENT)
        told = ("refused", None if directory is None else directory.epoch, (err.kind, err.message, err.info))
    except Exception as err:  # noqa: BLE001 - a request must be answered, and the server live on
        told = ("failed", None, f"{type(err).__name__}: {err}")
    return pickle.dumps(told, protocol=5)


def _serve(home: dict[str, Any], op: str, args: tuple[Any, ...], swept: list[int]) -> tuple[Any, ...]:
    directory: UnitDirectory | None = home.get(ARGUMENT)
    if op == "hello":
        return ("ok", *_hello(directory))
    if op == "open":
        return ("ok", *_open(home, directory, *args))
    if op == "close":
        return ("ok", *_close(home, directory, *args))
    if directory is None:
        raise Refused("DataPlaneUnavailable", "no plane runs here, or it was closed", no_plane=True)
    if op == "sweep":
        return ("ok", directory.epoch, directory.sweep(swept))
    if op not in UnitDirectory.OPS:
        raise Refused("DataPlaneUnsupported", f"the plane does not know the request {op!r}", capability=op)
    value = getattr(directory, op)(*args)
    if op in LEAVES_GARBAGE:
        return ("ok", directory.epoch, value, directory.sweep(swept, args[LEAVES_GARBAGE[op]]))
    return ("ok", directory.epoch, value)


def _hello(directory: UnitDirectory | None) -> tuple[str | None, dict[str, Any]]:
    if directory is None:
        return None, {"version": VERSION}
    facts = {
        "version": VERSION,
        "monotonic": time.monotonic(),
        "units": directory.units,
        "config": directory.config,
    }
    return directory.epoch, facts


def _open(
    home: dict[str, Any], directory: UnitDirectory | None, units: list[str], config: dict[str, Any]
) -> tuple[str, bool]:
    if directory is not None:
        return directory.epoch, False
    home[ARGUMENT] = made = UnitDirectory(units, config)
    return made.epoch, True


def _close(home: dict[str, Any], directory: UnitDirectory | None, epoch: str) -> tuple[None, Any]:
    if directory is None or directory.epoch != epoch:
        return None, {}
    del home[ARGUMENT]
    return None, directory.all_keys()
