"""Somebody else's transport, in a project of its own, is put to the contract by a few lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: A transport that is made in its own way and can do less than ours; its project knows asyncdp as an installed package.
TRANSPORT = """
from dataclasses import replace

from asyncdp import MemoryTransport, SlotMapping


class Shelf(SlotMapping):
    def __init__(self, config, bootstrap=True):
        super().__init__(MemoryTransport(config, bootstrap=bootstrap))

    def __reduce__(self):
        return Shelf, (self.attach_config(), False)

    @classmethod
    def build(cls, **config):
        whole = {"enabled": True, "impl": "memory", "backend": "simple", "storage_capacity": 1 << 20,
                 "num_storage_units": 2, "claim_meta_poll_interval_s": 0.01}
        return cls({**whole, **config})

    def visit(self, **config):
        return type(self)({**self.attach_config(), **config}, bootstrap=False)

    def get_capabilities(self):
        denied = ("slot_addressable", "slot_writes", "claim_dedup", "claim_release", "bound_mutations")
        return replace(super().get_capabilities(), **dict.fromkeys(denied, False))
"""

#: All that its author writes for the whole suite.
SUITE = """
import pytest
from contextlib import asynccontextmanager
from asyncdp.testing.contract import DataPlaneContract, Plane
from shelf import Shelf


class TestShelf(DataPlaneContract):
    loops = ("asyncio",)

    @pytest.fixture
    def open_plane(self):
        @asynccontextmanager
        async def opened(config):
            shelf = Shelf.build(**config)
            yield Plane(shelf, lambda config: shelf.visit(**config))

        return opened
"""

#: One that returns rows in another order than they were asked for in, put to two themes on both loops.
BROKEN = """
import pytest
from asyncdp.calls import GetSamples
from asyncdp.testing.contract import Claims, Reads, by_config
from shelf import Shelf


class Reversed(Shelf):
    async def execute(self, call, ctx):
        answer = await super().execute(call, ctx)
        return answer.flip(0) if isinstance(call, GetSamples) else answer


class TestReversed(Reads, Claims):
    @pytest.fixture
    def open_plane(self):
        return by_config(Reversed)
"""

FORGOTTEN = """
from asyncdp.testing.contract import Reads


class TestNothing(Reads):
    loops = ("asyncio",)
"""


def run(tmp_path: Path, suite: str, *options: str, asyncio: bool = False) -> tuple[int, str]:
    """Run a suite as its author would: his own folder, his own pytest settings."""
    plugins = "" if asyncio else " -p no:asyncio"
    (tmp_path / "shelf.py").write_text(TRANSPORT)
    (tmp_path / "test_shelf.py").write_text(suite)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = .\naddopts = -ra --strict-markers{plugins}\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_few_lines_put_a_transport_to_the_whole_contract(tmp_path: Path) -> None:
    """Every theme runs and passes; what the capabilities deny is skipped, and says so."""
    code, told = run(tmp_path, SUITE)
    assert code == 0, told[-6000:]
    passed = re.search(r"(\d+) passed", told)
    assert passed, told
    assert int(passed[1]) > 500
    assert "the capabilities of the transport say: no claim_release" in told
    assert len([line for line in SUITE.splitlines() if line.strip()]) <= 14


def test_a_transport_that_breaks_a_promise_is_told_which(tmp_path: Path) -> None:
    """The test that fails names the promise, and shows what came and what was wanted."""
    code, told = run(tmp_path, BROKEN)
    assert code == 1, told[-6000:]
    assert "test_shelf.py::TestReversed::test_metas_of_different_origin_are_read_together[asyncio]" in told
    assert "test_shelf.py::TestReversed::test_metas_of_different_origin_are_read_together[trio]" in told
    assert re.search(r"tensor\(\[1, 0, 2\]\) came for tensor\(\[2, 0, 1\]\)", told), told[-3000:]
    assert re.search(r"\d+ passed", told), "claims are as they should be"


def test_a_class_without_its_fixture_is_told_what_to_write(tmp_path: Path) -> None:
    """No guessing: the message names the class and the fixture."""
    code, told = run(tmp_path, FORGOTTEN, "-x")
    assert code == 1
    assert "TestNothing has no fixture open_plane" in told


def test_the_mode_auto_of_pytest_asyncio_is_told_what_it_needs(tmp_path: Path) -> None:
    """On trio each test says why it cannot run, on asyncio all is well."""
    code, told = run(tmp_path, BROKEN.replace("Reads, Claims", "Reads"), "-o", "asyncio_mode=auto", asyncio=True)
    assert code == 1
    assert "or a class with loops = ('asyncio',)" in told, told[-3000:]
    assert re.search(r"FAILED .*\[asyncio\]", told), "the broken transport is still told about there"
    assert re.search(r"\d+ passed", told), told[-3000:]
