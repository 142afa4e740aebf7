"""Rows as objects of Mooncake, addresses, network settings and imports; all without a master."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from asyncdp.transports.transfer_queue.endpoints import Endpoints, Server
from asyncdp.transports.transfer_queue.mooncake import unit
from asyncdp.transports.transfer_queue.mooncake.master import check_import
from asyncdp.transports.transfer_queue.mooncake.objects import pack, unpack
from asyncdp.transports.transfer_queue.mooncake.outgoing import LARGE_ROW_BYTES, Lent, lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAMES = ("MC_MOONCAKE_PROTOCOL", "MC_MOONCAKE_DEVICE", "MC_GID_INDEX", "MC_TCP_BIND_ADDRESS", "MC_STORE_MEMCPY")


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
    whole = Endpoints(server, (server,), mooncake={"master": "127.0.0.1:1", "buffer_bytes": 5, "protocol": "tcp"})
    assert Endpoints.from_config(whole.to_config()) == whole
    assert "mooncake" not in Endpoints(server, (server,)).to_config()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Give an environment that says nothing of Mooncake, and a machine with two devices, of which one is up."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
    for device, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    monkeypatch.setattr(unit, "INFINIBAND", tmp_path)
    return monkeypatch


def test_the_network_is_tcp_at_the_given_address(network: pytest.MonkeyPatch) -> None:
    """By default; the address is forced, and copies within a process go the same way as all others."""
    network.setenv("MC_TCP_BIND_ADDRESS", "0.0.0.0")
    network.setenv("MC_STORE_MEMCPY", "1")
    assert unit.transport_settings("127.0.0.1") == ("tcp", "")
    assert [os.environ[name] for name in NAMES[3:]] == ["127.0.0.1", "0"]


def test_rdma_takes_the_named_device_or_one_that_is_up(network: pytest.MonkeyPatch) -> None:
    """Also where the process that started the plane has said so; one's own environment goes before."""
    plane = {"MC_MOONCAKE_PROTOCOL": "rdma", "MC_GID_INDEX": "3"}
    assert unit.transport_settings("10.0.0.1", plane) == ("rdma", "mlx5_1")
    assert os.environ["MC_GID_INDEX"] == "3"
    network.setenv("MC_MOONCAKE_PROTOCOL", "rdma")
    network.setenv("MC_MOONCAKE_DEVICE", "mlx5_0")
    assert unit.transport_settings("10.0.0.1", {**plane, "MC_MOONCAKE_DEVICE": "mlx5_1"}) == ("rdma", "mlx5_0")
    assert unit.given_settings() == {**plane, "MC_MOONCAKE_DEVICE": "mlx5_0"}


@pytest.mark.parametrize(
    ("told", "culprit"),
    [
        ({"MC_MOONCAKE_PROTOCOL": "ucx"}, "MC_MOONCAKE_PROTOCOL: .*'ucx'"),
        ({"MC_MOONCAKE_PROTOCOL": "rdma"}, "MC_MOONCAKE_PROTOCOL: 'rdma' here, .*'tcp'"),
        ({"MC_GID_INDEX": "first"}, "MC_GID_INDEX: .*'first'"),
    ],
)
def test_a_network_that_cannot_be_is_refused_by_name(
    network: pytest.MonkeyPatch, told: Mapping[str, str], culprit: str
) -> None:
    """An unknown protocol, another one than the plane's, an index that is none."""
    for name, value in told.items():
        network.setenv(name, value)
    with pytest.raises(ValueError, match=culprit):
        unit.transport_settings("127.0.0.1", {"MC_MOONCAKE_PROTOCOL": "tcp"})


def test_rdma_without_a_device_is_refused_by_name(network: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is named and not there, and none that is up."""
    network.setenv("MC_MOONCAKE_PROTOCOL", "rdma")
    network.setenv("MC_MOONCAKE_DEVICE", "mlx9")
    with pytest.raises(ValueError, match=r"MC_MOONCAKE_DEVICE: 'mlx9' is not there; .*mlx5_0, mlx5_1"):
        unit.transport_settings("127.0.0.1")
    network.setenv("MC_MOONCAKE_DEVICE", "")
    (tmp_path / "mlx5_1" / "ports" / "1" / "state").write_text("1: DOWN\n")
    with pytest.raises(ValueError, match=r"MC_MOONCAKE_DEVICE: .*active port"):
        unit.transport_settings("127.0.0.1")


def test_large_values_are_sent_from_where_they_are() -> None:
    """What Mooncake is told to send is each row's object, and only its small parts were copied."""
    large, odd = torch.rand(3, LARGE_ROW_BYTES // 4), torch.rand(3, 30_001)
    rows = [pack(key, {"a": b"abc", "x": large[key], "n": torch.tensor(key), "y": odd[key]}) for key in range(3)]
    laid = lay_out(rows)
    assert laid is not None
    for row, pointers, sizes in zip(rows, laid.pointers, laid.sizes, strict=True):
        told = zip(pointers, sizes, strict=True)
        assert b"".join(ctypes.string_at(at, size) for at, size in told) == b"".join(row)
    assert laid.regions == sorted([(large.data_ptr(), large.nbytes), (odd.data_ptr(), odd.nbytes)])
    assert laid.copied.nbytes < 1024


def test_small_rows_and_scattered_ones_are_copied_together() -> None:
    """A connection for each would cost more than the copy; and memory in many places would have to be registered."""
    assert lay_out([pack(key, {"x": torch.rand(1024)}) for key in range(3)]) is None
    apart = torch.rand(40, 2, LARGE_ROW_BYTES // 4)[:, 0]
    assert lay_out([pack(key, {"x": apart[key]}) for key in range(40)]) is None


def test_memory_is_lent_once_at_a_time() -> None:
    """Mooncake refuses memory that it has: another request that overlaps copies it."""
    lent = Lent()
    assert lent.take([(0, 10), (100, 10)])
    assert not lent.take([(200, 10), (105, 1)])
    assert lent.take([(200, 10), (110, 5)])
    lent.give_back([(0, 10), (100, 10)])
    assert lent.take([(105, 1)])
