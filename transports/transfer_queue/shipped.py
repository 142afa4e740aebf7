"""Sends the sampler to a controller whose process need not have asyncdp installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["by_value"]

#: Everything that the sampler is made of; all else it uses is TransferQueue's or the standard library's. These import
#: each other's names, not modules: cloudpickle would send a module with all that is in it.
_SHIPPED = (
    "asyncdp.transports.transfer_queue.sampler",
    "asyncdp.transports.transfer_queue.directory",
    "asyncdp.transports.directory",
    "asyncdp.rows.field_spec",
)


@contextmanager
def by_value(pickler: Any) -> Iterator[Any]:
    """Yield a sampler that ``pickler`` (a cloudpickle module, Ray's or the original) pickles by value in this block."""
    from .sampler import DirectorySampler

    modules = [importlib.import_module(name) for name in _SHIPPED]
    for module in modules:
        pickler.register_pickle_by_value(module)
    try:
        yield DirectorySampler()
    finally:
        for module in modules:
            pickler.unregister_pickle_by_value(module)
