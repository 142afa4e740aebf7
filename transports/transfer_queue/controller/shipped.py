"""Pickles the sampler by value, for a controller process that need not have asyncdp installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["by_value"]

#: All modules that the sampler consists of; apart from these it uses only TransferQueue and the standard library. They
#: import names from each other, not modules, because cloudpickle would send a module with its whole content.
_SHIPPED = (
    "asyncdp.transports.transfer_queue.controller.sampler",
    "asyncdp.transports.transfer_queue.directory",
    "asyncdp.transports.directory",
    "asyncdp.rows.field_spec",
)


@contextmanager
def by_value(pickler: Any) -> Iterator[Any]:
    """Yield a sampler that ``pickler`` (cloudpickle, Ray's or the original module) pickles by value in this block."""
    from .sampler import DirectorySampler

    modules = [importlib.import_module(name) for name in _SHIPPED]
    for module in modules:
        pickler.register_pickle_by_value(module)
    try:
        yield DirectorySampler()
    finally:
        for module in modules:
            pickler.unregister_pickle_by_value(module)
