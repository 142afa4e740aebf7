"""Skips tests where Mooncake, or a library that it needs, is missing; the reason is the error of its import."""

from __future__ import annotations

import importlib.util

import pytest

__all__ = ["needs_mooncake"]


def needs_mooncake() -> None:
    """Skip, with the reason, where Mooncake cannot be imported."""
    if importlib.util.find_spec("transfer_queue") is None:
        pytest.skip("needs the extra mooncake", allow_module_level=True)
    from asyncdp.transports.transfer_queue.mooncake.master import check_import
    from asyncdp.transports.transfer_queue.mooncake.unit import transport_settings

    transport_settings("127.0.0.1")
    try:
        check_import()
    except ImportError as err:
        pytest.skip(str(err), allow_module_level=True)
