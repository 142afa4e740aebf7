"""What docs/testing.md shows runs as shown."""

import re
from pathlib import Path

import pytest
import trio.testing  # noqa: F401 - as below

import asyncdp.testing.pytest.markers
import asyncdp.testing.sweep  # noqa: F401 - kept loaded over runs in this process: torch cannot be loaded twice
from tests.testing.project import Project

pytest_plugins = ["pytester"]

TEXT = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def run(pytester: pytest.Pytester, *names: str, only: str = "", **changed: str) -> dict[str, int]:
    """Write blocks as files and run the tests among them; returns how many passed and failed."""
    project = Project(pytester.path).write(**{name: changed.get(name, BLOCKS[name]) for name in names})
    done = project.here(pytester, "-W", "error", "-k", only, without=["asyncio"])
    return done.counts


def test_every_block_is_a_file_that_is_run_here() -> None:
    """No python block of the page goes untested."""
    assert set(BLOCKS) == {"controller", "test_controller", "test_plans", "test_pair", "test_sweep", "test_my_plane"}
    assert TEXT.count("```python") == len(BLOCKS)


def test_a_test_of_your_own_controller_takes_fifteen_lines(pytester: pytest.Pytester) -> None:
    """The controller's test passes, and has no more lines than promised."""
    assert len([line for line in BLOCKS["test_controller"].splitlines() if line.strip()]) <= 15
    assert run(pytester, "controller", "test_controller") == {"passed": 5}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "AWAY:\n                    self.outages",
            "ZeroDivisionError:\n    self.outages",
        ),
        pytest.param("version < self.oldest", "version <= self.oldest", marks=pytest.mark.slow),
        ("await self.until_back()", "return"),
    ],
    ids=["gives up", "evicts too much", "never comes back"],
)
def test_it_notices_a_controller_that_is_wrong(pytester: pytest.Pytester, right: str, wrong: str) -> None:
    """The test of the page is one that can fail."""
    code = BLOCKS["controller"]
    assert code.count(right) == 1
    broken = code.replace(right, wrong.replace("\n    self", "\n                    self"))
    assert run(pytester, "controller", "test_controller", controller=broken)["failed"] == 5


@pytest.mark.parametrize("name", ["test_plans", "test_pair", pytest.param("test_sweep", marks=pytest.mark.slow)])
def test_the_tour_runs(pytester: pytest.Pytester, name: str) -> None:
    """Each example of the tour passes."""
    counts = run(pytester, "controller", name)
    assert set(counts) == {"passed"}


def test_a_transport_is_put_to_the_contract_by_one_fixture(pytester: pytest.Pytester) -> None:
    """The class of the page runs the suite's tests; some of them here, all of them in tests/contract."""
    counts = run(pytester, "test_my_plane", only="test_empty_ids_are_a_no_op or test_a_put_tells_what_it_wrote")
    assert counts["passed"] == 2
