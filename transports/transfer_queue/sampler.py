"""The door through which requests reach the directory: a sampler of TransferQueue.

TransferQueue lets one sampler run on the controller's request thread, between two requests of anybody. A fetch with
``sampling_config={ARGUMENT: request}`` on the plane's reserved partition is answered by the directory that lives in it;
any other fetch is served as TransferQueue's own sequential sampler does. The answer travels as custom metadata of a row
that does not exist, since a sampler can return nothing but indexes.

All state lies in the reserved partition, none in the sampler: it may be registered again at any time, and what is
registered twice loses nothing.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from transfer_queue.sampler import BaseSampler

from asyncdp.transports.transfer_queue.directory.reads import Directory
from asyncdp.transports.transfer_queue.directory.state import Refused

__all__ = ["ARGUMENT", "VERSION", "DirectorySampler"]

#: Name of the argument that carries a request, and of the metadata that carries its answer.
ARGUMENT = "asyncdp"
#: Of the requests and answers. Both sides say it; another one is refused.
VERSION = 1
#: Index of the row that carries the answer. TransferQueue's own indexes begin at 0.
ANSWER = -1
#: Requests that are answered with garbage to sweep, and which of their arguments is the op_id.
LEAVES_GARBAGE = {"publish": 2, "clear": 2, "drop": 1}


class DirectorySampler(BaseSampler):  # type: ignore[misc]  # the base is untyped
    """Serves the directory's requests, and everybody else's as they came."""

    def has_cached_result(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ARG002 - TransferQueue's signature
        """Tell TransferQueue not to wait for samples on our behalf."""
        return False

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any = None, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Answer a request, or choose the first ``batch_size`` ready indexes."""
        del args
        request = kwargs.get(ARGUMENT)
        if request is None:
            chosen = ready_indexes[:batch_size] if len(ready_indexes) >= batch_size else []
            return chosen, list(chosen)
        if partition is None:
            return [], []
        partition.custom_meta[ANSWER] = {ARGUMENT: self._answer(partition, request)}
        return [ANSWER], []

    def _answer(self, partition: Any, request: bytes) -> bytes:
        op, args, swept = pickle.loads(request)  # noqa: S301 - TransferQueue unpickles whatever reaches it as well
        try:
            answer = self._serve(partition.__dict__, op, args, swept)
        except Refused as err:
            directory = partition.__dict__.get(ARGUMENT)
            answer = ("refused", None if directory is None else directory.epoch, (err.kind, err.message, err.info))
        except Exception as err:  # noqa: BLE001 - a request must be answered, and the controller live on
            answer = ("failed", None, f"{type(err).__name__}: {err}")
        return pickle.dumps(answer, protocol=5)

    def _serve(self, home: dict[str, Any], op: str, args: tuple[Any, ...], swept: list[int]) -> tuple[Any, ...]:
        directory: Directory | None = home.get(ARGUMENT)
        if op in ("hello", "open", "close"):
            return ("ok", *getattr(self, f"_{op}")(home, directory, *args))
        if directory is None:
            raise Refused("DataPlaneUnavailable", "there is no plane here, or no more", no_plane=True)
        if op == "sweep":
            return ("ok", directory.epoch, directory.sweep(swept))
        if op not in Directory.OPS:
            raise Refused("DataPlaneUnsupported", f"the plane does not know the request {op!r}", capability=op)
        value = getattr(directory, op)(*args)
        if op in LEAVES_GARBAGE:
            return ("ok", directory.epoch, value, directory.sweep(swept, args[LEAVES_GARBAGE[op]]))
        return ("ok", directory.epoch, value)

    @staticmethod
    def _hello(home: dict[str, Any], directory: Directory | None) -> tuple[str | None, dict[str, Any]]:
        del home
        if directory is None:
            return None, {"version": VERSION}
        facts = {
            "version": VERSION,
            "monotonic": time.monotonic(),
            "units": directory.units,
            "config": directory.config,
        }
        return directory.epoch, facts

    @staticmethod
    def _open(
        home: dict[str, Any], directory: Directory | None, units: list[str], config: dict[str, Any]
    ) -> tuple[str, bool]:
        if directory is not None:
            return directory.epoch, False
        home[ARGUMENT] = made = Directory(units, config)
        return made.epoch, True

    @staticmethod
    def _close(home: dict[str, Any], directory: Directory | None, epoch: str) -> tuple[None, Any]:
        if directory is None or directory.epoch != epoch:
            return None, {}
        del home[ARGUMENT]
        return None, directory.all_keys()
