"""The order of the tests, a random one that can be repeated, and which process runs which of them."""

from __future__ import annotations

import os
import random
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "RAY",
    "is_on_ray",
    "place",
    "pytest_addoption",
    "pytest_configure_node",
    "pytest_ignore_collect",
    "pytest_xdist_make_scheduler",
    "said",
    "shuffle",
    "within_tests",
]

HERE = Path(__file__).parent
#: Files and folders whose tests need Ray. One process runs them all, and nothing after them: once Ray runs, its
#: threads open and close sockets whenever they like, which the leak guard would see.
ON_RAY = (
    "chaos/test_mooncake.py",
    "chaos/test_transfer_queue.py",
    "contract/test_transfer_queue.py",
    "examples/test_grpo_processes.py",
    "sweep/test_transfer_queue.py",
    "testing/test_real_planes.py",
    "transfer_queue/",
)
#: What that process is told to run, and what the others are.
RAY, REST = "on Ray", "the rest"
#: Begun first where several processes share the tests, so that none waits for another's long file at the end.
LONG = ("ucxx/test_namespace.py", "ucxx/test_cases_inside.py", "contract/", "ucxx/", "examples/")
_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what repeats an order."""
    text = "order of the tests: this seed's (default: a new one, which is printed), 0: as they stand in the files"
    parser.addoption("--order-seed", type=int, default=os.environ.get("ASYNCDP_ORDER_SEED") or None, help=text)


def seed_of(config: pytest.Config) -> int:
    """Return the seed of this session: that of the option, of the process that shares out the tests, or a new one."""
    if _SEED not in config.stash:
        given = getattr(config, "workerinput", {}).get("order_seed", config.getoption("--order-seed"))
        config.stash[_SEED] = random.SystemRandom().randrange(1, 1 << 31) if given is None else given
    return config.stash[_SEED]


def said(config: pytest.Config) -> str:
    """Return what a person needs to repeat the order."""
    return f"order of the tests: --order-seed {seed_of(config)}"


def within_tests(path: str | PurePath) -> str:
    """Return a path relative to tests/."""
    whole = PurePath(path)
    if whole.is_absolute():
        return str(whole.relative_to(HERE)) if whole.is_relative_to(HERE) else str(whole)
    return str(PurePath(*whole.parts[1:])) if whole.parts[0] == HERE.name else str(whole)


def is_on_ray(path: str | PurePath) -> bool:
    """Return whether the tests of a file need Ray."""
    return within_tests(path).startswith(ON_RAY)


def shuffle(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests of each file among themselves; servers of a file are then started once."""
    if seed := seed_of(config):
        random.Random(seed).shuffle(items)
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        items[:] = [item for file in files.values() for item in file]


def place(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by files. Where several processes share the tests, Ray has one of its own, and long files come first."""
    if not hasattr(config, "workerinput"):
        items.sort(key=lambda item: is_on_ray(item.path))
        return

    def rank(item: pytest.Item) -> int:
        path = within_tests(item.path)
        return -1 if is_on_ray(path) else _first(path, LONG)

    items.sort(key=rank)


def _first(path: str, prefixes: Iterable[str]) -> int:
    number = -1
    for number, prefix in enumerate(prefixes):
        if path.startswith(prefix):
            return number
    return number + 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process of pytest-xdist the seed, and, where all tests are run, its share of them.

    To collect a share takes less: of all tests there are twice as many as in a run, and each process compiles them.
    """
    number, count = int(node.gateway.id.removeprefix("gw")), len(node.nodemanager.specs)
    shared = node.config.args_source is pytest.Config.ArgsSource.TESTPATHS and 1 < count > number
    node.workerinput["order_seed"] = seed_of(node.config)
    node.workerinput["share"] = (REST if number else RAY) if shared else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is another process' share."""
    share = getattr(config, "workerinput", {}).get("share")
    other = share is not None and collection_path.is_file() and is_on_ray(collection_path) != (share == RAY)
    return True if other else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out the tests by files, those on Ray to one process."""
    from tests.sharing import ByFile

    config.option.loadscopereorder = False
    return ByFile(config, log)
