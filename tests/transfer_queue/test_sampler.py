"""The sampler: shipped by value, harmless to others, no request left unanswered."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdp.transports.transfer_queue.controller import sampler
from asyncdp.transports.transfer_queue.controller.sampler import DirectorySampler
from asyncdp.transports.transfer_queue.directory import requests as door
from tests.transfer_queue.servers import pickled_sampler

CONFIG = {"capacity": 8, "group_pattern": r"(?P<group>.+)_g\d+", "strict_schema": False, "auto_register": False}


def ask(partition: Any, op: str, *args: Any) -> Any:
    """Send a request as TransferQueue does."""
    request = pickle.dumps((op, args, []))
    indexes, consumed = DirectorySampler()([], 0, partition=partition, asyncdp=request)
    assert (indexes, consumed) == ([sampler.ANSWER], [])
    return pickle.loads(partition.custom_meta[sampler.ANSWER][door.ARGUMENT])


@pytest.fixture
def partition() -> Any:
    """Give what the sampler sees of TransferQueue's partition."""
    return SimpleNamespace(custom_meta={})


@pytest.mark.slow
def test_it_runs_where_asyncdp_is_not_installed() -> None:
    """Unpickled in a process that cannot import asyncdp it serves requests: everything went by value."""
    code = textwrap.dedent(
        """
        import sys
        class Refuse:
            def find_spec(self, name, *rest):
                if name.partition(".")[0] == "asyncdp":
                    raise ImportError(name)
        sys.meta_path.insert(0, Refuse())
        import pickle, types, cloudpickle
        made = cloudpickle.loads(sys.stdin.buffer.read())
        home = types.SimpleNamespace(custom_meta={})
        def ask(op, *args):
            made([], 0, partition=home, asyncdp=pickle.dumps((op, args, [])))
            return pickle.loads(home.custom_meta[-1]["asyncdp"])
        config = {"capacity": 8, "group_pattern": "x", "strict_schema": False, "auto_register": False}
        print(ask("open", ["u0"], config)[0], ask("register", "p", ["x"], 1, ["t"], None, {})[0])
        placed = ask("place", "p", ["a"], ["x"], "op", 1, (), 9.0)[2]
        spec = {"x": ("object", "", (), False, ())}
        put = ("p", ["a"], "op", 1e18, "me", None, placed[1], {"x": ("o",)}, spec, {"x": 3})
        print(len(ask("publish", *put)[2][0]), ask("claim", "p", "t", ["x"], 1, 1, "c", 1e18, "me", None)[2][1])
        again = ask("place", "p", ["a"], ["x"], "op2", 1, (), 9.0)[2]
        spec = {"x": ("tensor", "int64", (), False, ())}
        put = ("p", ["a"], "op2", 1e18, "me", None, again[1], {"x": ("d",)}, spec, {"x": 3})
        print(ask("publish", *put)[2][:2])
        print(ask("groups", "nowhere", 0)[0], any(name.startswith("asyncdp") for name in sys.modules))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickled_sampler(), capture_output=True, timeout=240, check=False
    )
    told = done.stdout.decode().splitlines()
    conflict = ("DataPlaneBadRequest", "field 'x' holds object, not int64[]")
    assert told == ["ok ok", "1 ['a']", str(conflict), "refused False"], done.stderr.decode()


def test_others_are_served_as_before() -> None:
    """A fetch without our argument gets the first ready indexes, all or none, each once."""
    assert DirectorySampler()([3, 4, 5], 2, partition=None) == ([3, 4], [3, 4])
    assert DirectorySampler()([3], 2, partition=None) == ([], [])
    assert not DirectorySampler().has_cached_result("p", "t", {})


def test_every_request_is_answered(partition: Any) -> None:
    """Unknown ones, wrong arguments, no plane: an answer, and the controller lives on."""
    assert ask(partition, "hello") == ("ok", None, {"version": door.VERSION})
    assert ask(partition, "depth", "p", frozenset())[0] == "refused"
    _, epoch, new = ask(partition, "open", ["u0"], CONFIG)
    assert new
    assert ask(partition, "open", ["u0"], CONFIG) == ("ok", epoch, False)
    assert ask(partition, "no such thing")[2][0] == "DataPlaneUnsupported"
    assert ask(partition, "__init__", [], {})[2][0] == "DataPlaneUnsupported"
    assert ask(partition, "depth")[0] == "failed"
    assert ask(partition, "hello")[1] == epoch


def test_registered_again_it_loses_nothing(partition: Any) -> None:
    """All state is in the partition: each request here comes to a new sampler."""
    ask(partition, "open", ["u0"], CONFIG)
    ask(partition, "register", "p", ["x"], 1, ["t"], None, {})
    assert ask(partition, "has", "p")[2] is True


def test_only_the_plane_of_that_epoch_is_closed(partition: Any) -> None:
    """A late close does not end the next plane of the same name."""
    _, epoch, _ = ask(partition, "open", ["u0"], CONFIG)
    ask(partition, "close", "another epoch")
    assert ask(partition, "hello")[1] == epoch
    ask(partition, "close", epoch)
    assert ask(partition, "hello")[1] is None


def test_transfer_queues_snapshots_hold_nothing_of_ours(partition: Any) -> None:
    """Its checkpoints are pickled by name, and read where asyncdp may be missing."""
    import copy

    ask(partition, "open", ["u0"], CONFIG)
    assert copy.deepcopy(partition.__dict__)[door.ARGUMENT] == {}
