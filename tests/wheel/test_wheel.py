"""A slice of ``make test-wheel``: the wheel is whole, works without extras and with one, and passes tests."""

import pytest

from tests.wheel.__main__ import main

pytest.importorskip("hatchling", reason="needs the extra: pip install 'asyncdp[dev]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_wheel_is_whole_and_works(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what the sdist builds too; nothing that an extra needs is missing in a venv that holds what it names."""
    code = main(["--extra", "", "--extra", "prometheus", "tests/sans_io"])
    told = capsys.readouterr().out
    assert code == 0, told
    for part in ("builds the same", "extra -: works", "extra prometheus: works", "tests against ", " passed"):
        assert part in told, told
