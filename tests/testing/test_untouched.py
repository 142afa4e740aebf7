"""U20: the guard of what tests leave changed, proved by tests that leave something changed."""

import textwrap
from pathlib import Path

import pytest

from tests.testing.project import Project

TESTS = """
    import asyncio, os, signal
    import pytest
    import asyncdp

    @pytest.fixture(scope="module", autouse=True)
    def what_a_wider_fixture_changes_is_no_tests_doing():
        os.environ["WIDER"] = "1"
        yield
        del os.environ["WIDER"]

    def test_first_of_all():
        pass

    def test_clean(monkeypatch, tmp_path):
        monkeypatch.setenv("SECRET", "1")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(asyncdp.Client, "close", None)
        monkeypatch.setattr(asyncdp.errors, "DataPlaneError", None)

    def test_lazily():
        from asyncdp.transports.memory import plane
        assert asyncdp.MemoryTransport

    def test_environment():
        os.environ["SECRET"] = "1"

    def test_directory():
        os.chdir("/")

    def test_signal():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def test_umask():
        os.umask(0o077)

    def test_policy():
        class Policy(asyncio.DefaultEventLoopPolicy):
            pass
        asyncio.set_event_loop_policy(Policy())

    def test_module():
        asyncdp.errors.DataPlaneError = None

    def test_class():
        asyncdp.Client.close = None

    def test_new():
        asyncdp.Client.added = 1

    def test_last():
        pass
"""


@pytest.mark.slow
def test_what_a_test_leaves_changed_is_told_by_name(tmp_path: Path) -> None:
    """Each that changes something fails, and no other does."""
    project = Project(tmp_path).write(
        conftest="def pytest_configure(config):\n    from tests.untouched import Untouched\n"
        "    config.pluginmanager.register(Untouched())\n",
        test_changes=textwrap.dedent(TESTS),
    )
    run = project.apart("-p", "no:asyncio")
    told = {
        "environment": "the environment's SECRET",
        "directory": "the working directory",
        "signal": "SIGTERM",
        "umask": "the umask",
        "policy": "the event loop policy",
        "module": "asyncdp.errors.DataPlaneError",
        "class": "Client.close",
        "new": "Client.added",
    }
    for name, what in told.items():
        assert any(f"test_{name} has left changed" in line and what in line for line in run.text.splitlines()), name
    assert run.counts == {"passed": 12, "error": len(told)}, run.text
