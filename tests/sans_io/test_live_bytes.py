from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncdp.middleware.policy.live_bytes import LiveBytes, leaf_nbytes, sizes_of


def jagged(*lengths: int) -> torch.Tensor:
    """Rows of 4-byte floats of these lengths."""
    return torch.nested.nested_tensor([torch.zeros(k) for k in lengths], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("leaf", "nbytes"),
    [
        (torch.zeros(3, 2, dtype=torch.float64), 48),
        (torch.zeros(3, dtype=torch.bfloat16), 6),
        (["four", b"abc", None, 1], 4 + 3 + 8 + 8),
        (("ab", 1.5), 2 + 8),
        (np.array(["u", "vw"], dtype=object), 3),
        (np.zeros(3), 24),
        ("text", 4),
        (b"", 0),
        (None, 8),
        ({"a": 1}, 8),
        ([], 0),
    ],
    ids=repr,
)
def test_a_leaf_counts_its_payload(leaf: Any, nbytes: int) -> None:
    """Tensors by their bytes, texts by their length, any other value as 8."""
    assert leaf_nbytes(leaf) == nbytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_ragged_rows_count_what_they_hold() -> None:
    """No padding, no offsets."""
    assert leaf_nbytes(jagged(1, 4, 0)) == 20


def test_fields_are_counted_one_by_one() -> None:
    """A mapping or a TensorDict; no fields are no bytes."""
    assert sizes_of({"x": torch.zeros(2), "t": ["abc", "d"]}) == {"x": 8, "t": 4}
    assert sizes_of(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2])) == {"x": 24}
    assert sizes_of({1: "ab"}) == {"1": 2}  # type: ignore[dict-item]
    assert sizes_of(None) == {}


def test_a_put_is_entered_and_told() -> None:
    """Its bytes, shared evenly; the peak and the largest key are remembered."""
    account = LiveBytes()
    assert (account.outstanding, account.peak, account.keys(), account.by_partition()) == (0, 0, 0, {})
    assert (account.last_put_bytes_per_key, account.max_bytes_per_key_seen) == (0, 0)
    assert account.put("p", ["a", "b"], {"x": torch.zeros(2, 2)}) == 16
    assert (account.outstanding, account.peak, account.keys()) == (16, 16, 2)
    assert (account.last_put_bytes_per_key, account.max_bytes_per_key_seen) == (8, 8)
    assert account.by_partition() == {"p": 16}


def test_what_cannot_be_shared_evenly_is_the_first_keys() -> None:
    """11 bytes over 3 keys: 5, 3, 3; and nothing is lost over several fields."""
    account = LiveBytes()
    assert account.put_sizes("p", ["a", "b", "c"], {"x": 11}) == 11
    assert (account.max_bytes_per_key_seen, account.last_put_bytes_per_key) == (5, 3)
    account.clear("p", ["a"])
    assert account.outstanding == 6
    account.clear("p", ["b"])
    assert account.outstanding == 3
    account = LiveBytes()
    assert account.put_sizes("p", ["a", "b", "c"], {"x": 5, "y": 5, "z": 4}) == 14
    assert account.outstanding == 14
    assert (account.max_bytes_per_key_seen, account.last_put_bytes_per_key) == (6, 4)
    account.clear("p", ["b", "c"])
    assert account.outstanding == 6


def test_a_field_that_is_put_again_replaces_what_it_had() -> None:
    """Other fields of the key stay; less is less, and the peak stays."""
    account = LiveBytes()
    account.put_sizes("p", ["a", "b"], {"x": 20, "y": 10})
    assert account.put_sizes("p", ["a"], {"x": 4}) == 4
    assert account.outstanding == (4 + 5) + (10 + 5)
    assert account.by_partition() == {"p": account.outstanding}


def test_a_replaced_field_counts_once() -> None:
    """Twice the same put is one."""
    account = LiveBytes()
    for _ in range(2):
        account.put_sizes("p", ["a", "b"], {"x": 20, "y": 11})
    assert (account.outstanding, account.peak, account.max_bytes_per_key_seen) == (31, 31, 16)


def test_a_put_of_tags_only_holds_its_keys_and_no_bytes() -> None:
    """It does not change what the last put of fields was."""
    account = LiveBytes()
    account.put_sizes("p", ["a"], {"x": 6})
    assert account.put("p", ["b"], None) == 0
    assert (account.keys(), account.outstanding, account.last_put_bytes_per_key) == (2, 6, 6)


def test_a_field_of_no_bytes_is_a_put_of_fields() -> None:
    """Zero is a size."""
    account = LiveBytes()
    account.put_sizes("p", ["a"], {"x": 6})
    account.put_sizes("p", ["b"], {"x": 0})
    assert account.last_put_bytes_per_key == 0
    assert account.max_bytes_per_key_seen == 6


def test_removed_keys_are_off_the_account() -> None:
    """Named ones, or the whole partition; what is not held is no error, and is counted as named."""
    account = LiveBytes()
    account.put_sizes("p", ["a", "b", "c"], {"x": 9})
    account.put_sizes("q", ["a"], {"x": 5})
    assert account.clear("p", ["a", "nobody"]) == 2
    assert (account.outstanding, account.keys()) == (11, 3)
    assert account.clear("nowhere", ["a"]) == 1
    assert account.clear("nowhere", None) == 0
    assert account.clear("p", None) == 2
    assert account.by_partition() == {"q": 5}
    assert (account.outstanding, account.peak, account.keys()) == (5, 14, 1)
    assert account.clear("p", None) == 0
    assert account.clear("q", ["a"]) == 1
    assert account.by_partition() == {}
    assert account.outstanding == 0


def test_the_peak_is_the_highest_there_ever_was() -> None:
    """Less held later does not lower it; more raises it."""
    account = LiveBytes()
    account.put_sizes("p", ["a"], {"x": 10})
    account.clear("p", None)
    account.put_sizes("p", ["a"], {"x": 4})
    assert (account.outstanding, account.peak) == (4, 10)
    account.put_sizes("p", ["b"], {"x": 20})
    assert account.peak == 24


def test_a_key_holds_what_its_life_holds() -> None:
    """Another incarnation begins anew; a removal that means a former one takes nothing; rows left out hold nothing."""
    account = LiveBytes()
    account.put_sizes("p", ["a", "b"], {"x": 8}, {"a": 1, "b": 2})
    assert account.put_sizes("p", ["a", "b"], {"y": 20}, {"a": 3}) == 10
    assert account.outstanding == 4 + 10
    account.clear("p", ["a", "b"], [1, 2])
    assert (account.outstanding, account.keys()) == (10, 1)
    account.clear("p", ["a"], [None])
    assert (account.outstanding, account.keys()) == (0, 0)
    account.put_sizes("p", ["a"], {"x": 4}, {"a": None})
    account.clear("p", ["a"], [7])
    assert account.outstanding == 0
