"""Rows as objects of Mooncake, addresses and imports; all without a master."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

from asyncdp.transports.transfer_queue.endpoints import Endpoints, Server
from asyncdp.transports.transfer_queue.mooncake.master import check_import
from asyncdp.transports.transfer_queue.mooncake.objects import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping


def _object(key: int, row: Mapping[str, object]) -> memoryview:
    return memoryview(bytearray().join(pack(key, row)))


def test_a_row_comes_back_as_it_was() -> None:
    """Bytes, tensors of any type and shape, and values of zero length; a part of the fields, in any order."""
    row = {
        "bytes": b"abc",
        "empty": b"",
        "half": torch.arange(5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(7),
    }
    found = unpack(5, _object(5, row), ["scalar", "none", "half", "empty", "bytes"])
    assert bytes(found["bytes"]) == b"abc"
    assert bytes(found["empty"]) == b""
    for name in ("half", "none", "scalar"):
        assert found[name].dtype == row[name].dtype
        assert torch.equal(found[name], row[name])


def test_another_row_or_half_a_row_is_refused() -> None:
    """The object of another key, and a field that it lacks, are KeyErrors; one that is cut is a ValueError."""
    whole = _object(5, {"x": b"0123456789abcdef"})
    with pytest.raises(KeyError, match="6"):
        unpack(6, whole, ["x"])
    with pytest.raises(KeyError, match="y"):
        unpack(5, whole, ["y"])
    for size in (3, 20, len(whole) - 1):
        with pytest.raises(ValueError, match="object"):
            unpack(5, whole[:size], ["x"])


def test_an_import_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import's own message is shown, with the extra and the library that it may lack."""
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match=r"mooncake.*asyncdp\[mooncake\].*libibverbs1") as caught:
        check_import()
    assert isinstance(caught.value.__cause__, ImportError)


def test_addresses_survive_a_config() -> None:
    """The master's address and the buffer's size are part of attach_config()."""
    server = Server("a", "127.0.0.1", {"put_get_socket": 1, "segment": 2, "transfer": 3})
    whole = Endpoints(server, (server,), mooncake={"master": "127.0.0.1:1", "buffer_bytes": 5})
    assert Endpoints.from_config(whole.to_config()) == whole
    assert "mooncake" not in Endpoints(server, (server,)).to_config()
