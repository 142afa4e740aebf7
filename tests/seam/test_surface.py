"""The seam is frozen: a change of its surface has to be written down where a reviewer sees it."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("surface", Path(__file__).with_name("surface.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
surface = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(surface)


def test_the_surface_is_the_one_written_down() -> None:
    """The seam looks as surface.txt says; `python tests/seam/surface.py` accepts a change."""
    assert surface.surface() == surface.FILE.read_text()


def test_the_surface_names_what_everything_stands_on() -> None:
    """The text is no empty promise: verbs, slot calls and the error tree are in it."""
    text = surface.FILE.read_text()
    for expected in (
        "async def put_samples(",
        "def batches(",
        "def attach_config(",
        "class ReadSlots(Call)",
        "class StaleSlotError(DataPlaneReadError)",
        "class KVBatchMeta",
        "class CallContext",
    ):
        assert expected in text
