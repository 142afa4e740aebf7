"""What SECURITY.md promises is what the code has."""

import re
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")

from asyncdp.config import UcxxSettings
from asyncdp.transports.ucxx.host import host, operator_log, service, session, ucx_watchdog
from asyncdp.transports.ucxx.host.limits import endpoint_tokens as claims
from asyncdp.transports.ucxx.host.limits import memory_share, pending_connections, reply_room, time_slices
from asyncdp.transports.ucxx.host.settings import HostSettings
from asyncdp.transports.ucxx.payload import layout, objects
from asyncdp.transports.ucxx.slots import header, store
from asyncdp.transports.ucxx.wire import control, engine
from asyncdp.transports.ucxx.wire import messages as wire
from tests.docs.test_ucxx import _value

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
WORDS = " ".join(TEXT.split())
OF = {"host": HostSettings, "client": UcxxSettings}
BYTES = {"KiB": 1 << 10, "MiB": 1 << 20}


def test_settings_have_the_defaults_that_the_table_says() -> None:
    """Each of the table, and each that the text names is in the table."""
    rows = re.findall(r"^\| `(\w+)` \| (host|client) \| (.*?) \|", TEXT, re.MULTILINE)
    assert len(rows) > 8
    for name, whose, said in rows:
        (field,) = (field for field in msgspec.structs.fields(OF[whose]) if field.name == name)
        assert _value(said) == field.default, name
    fields = {field.name for kind in OF.values() for field in msgspec.structs.fields(kind)}
    assert fields & set(re.findall(r"`(\w+)(?:: \w+)?`", TEXT)) == {name for name, _, _ in rows}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (r"may send (1 KiB) at once", wire.GREETING_BYTES),
        (r"say nothing (\d+) are kept at a time", pending_connections.MOST),
        (r"say something (\d+) too", host._GREETED_AT_ONCE),
        (r"keeps (\d+) descriptors for itself", ucx_watchdog._OWN),
        (r"one-time token of (\d+) bytes", claims._TOKEN_BYTES),
        (r"(\d+) strangers at a time", claims._STRANGERS),
        (r"tells (\d+) lines of a kind in", operator_log._LINES),
        (r"lines of a kind in (\d+) s", operator_log._SPAN_S),
        (r"name ([\d,]+) slots \| refused", wire.MOST_REFS),
        (r"have ([\d,]+) entries", wire.MOST_PICKED),
        (r"have ([\d,]+) rows and", wire.MOST_ROWS),
        (r"rows and ([\d,]+) fields", wire.MOST_FIELDS),
        (r"have ([\d,]+) rows x fields", service._MOST_CELLS),
        (r"name ([\d,]+) slots \| as a read", wire.MOST_SLOTS),
        (r"frame \| have (\d+ MiB)", wire.BODY_BYTES),
        (r"a read or drop (\d+ MiB)", wire.REQUESTS.most[7]),
        (r"not decoded, take (\d+ MiB) of all", host._INCOMING_BYTES),
        (r"beside (\d+ MiB) of each", control.LARGE_BYTES),
        (r"counts as (\d+) times its length", session._DECODED),
        (r"Those over (\d+ MiB) take", memory_share.SMALL_BYTES),
        (r"repeat rows for (\d+ MiB)", reply_room.REPEATED_BYTES),
        (r"published within ([\d,]+) s", wire.LONGEST_PUT_S),
        (r"takes longer than (\d+) ms is done in slices", time_slices.SLICE_S * 1000),
        (r"name ([\d,]+) fields and rows one by one", reply_room.MOST_NAMED),
        (r"name ([\d,]+) rows one by one x fields", reply_room.MOST_CELLS),
        (r"describe ([\d,]+) columns", layout._MAX_COLUMNS),
        (r"payloads takes (\d+ MiB)", layout._CACHED_BYTES),
        (r"of the lengths of rows (\d+ MiB)", store.MOST_LAYOUT_BYTES),
        (r"lacks less than (\d+) bytes", engine._MARK_BYTES),
        (r"Replies over (\d+ MiB)", memory_share.SMALL_BYTES),
        (r"not taken within (\d+) s", session._TAKES_S),
        (r"more for each (\d+ MiB)", session._TAKES_BYTES),
        (r"not used for (\d+) s goes back", host._IDLE_S),
        (r"more than (\d+) members have one hash", objects._MOST_ALIKE),
        (r"nested deeper than (\d+)", objects._MAX_DEPTH),
        (r"generations of slots are (\d+) random bits", header.GENERATIONS.bit_length() - 1),
    ],
)
def test_numbers_are_those_of_the_code(words: str, value: float) -> None:
    """Each limit that is promised."""
    found = re.search(words, WORDS)
    assert found is not None
    number, _, unit = found[1].replace(",", "").partition(" ")
    assert int(number) * BYTES.get(unit, 1) == value


def test_links_lead_somewhere_and_the_other_pages_lead_here() -> None:
    """A relative link names a file that is there."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text()
    assert "](../SECURITY.md)" in (ROOT / "docs" / "ucxx.md").read_text()
