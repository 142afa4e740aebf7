"""Skips tests where Mooncake, or a library that it needs, is missing; the reason is the error of its import."""

from __future__ import annotations

import importlib.util

import pytest

__all__ = ["lacking", "needs_mooncake"]


def lacking() -> str:
    """Return why Mooncake cannot be imported; empty if it can be."""
    if importlib.util.find_spec("transfer_queue") is None:
        return "needs the extra mooncake"
    from asyncdp.transports.transfer_queue.mooncake.master import check_import
    from asyncdp.transports.transfer_queue.mooncake.unit import transport_settings

    transport_settings("127.0.0.1")
    try:
        check_import()
    except ImportError as err:
        return str(err)
    return ""


def needs_mooncake() -> None:
    """Skip, with the reason, where Mooncake cannot be imported."""
    if reason := lacking():
        pytest.skip(reason, allow_module_level=True)
