"""``asyncdp top``: what it sees of a plane and of the clients that publish, in the terminal and as a page."""

import io
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from typer.testing import CliRunner

from asyncdp import Client, MemoryTransport, default_layers, layers_of, stack
from asyncdp.cli.app import app
from asyncdp.cli.tables import console
from asyncdp.cli.top.overview import Overviews, _quarantines, _wrong
from asyncdp.cli.top.page import PAGE, serve_page
from asyncdp.cli.top.terminal import screen
from asyncdp.metrics.plane import PlaneWatch
from asyncdp.metrics.published import LONGEST, PARTITION, ClientReport, Publisher, read_reports
from asyncdp.testing import FaultPlan
from tests.cli.chromium import PROGRAM, chromium

SECTIONS = ("Calls", "Partitions", "Hosts", "Ports that are not healthy", "Claims", "Retries", "Clients")


@asynccontextmanager
async def under_faults() -> AsyncIterator[tuple[Client, MemoryTransport]]:
    """A plane whose first read was refused by a port, with a host down, claims, and a client that publishes."""
    plan = FaultPlan().on("get_samples", call="ReadSlots").refuse(times=1).on("depth").refuse(times=1)
    transport = MemoryTransport()
    async with stack(transport, [*default_layers(backoff_base_s=0.001), plan.layer]) as client:
        await client.register_partition("p[red]", ["x"], 64, ["train"], grpo_group_size=2)
        publisher = Publisher(client)
        assert await publisher.publish()
        for group in range(3):
            ids = [f"g{group}_g{i}" for i in range(2)]
            await client.put_samples(ids, "p[red]", {"x": torch.zeros(2, 3)}, [{"weight_version": group}] * 2)
        await client.get_samples(["g0_g0"], "p[red]", ["x"])
        await client.depth("p[red]")
        await client.claim_meta("p[red]", "train", ["x"], 2)
        assert await publisher.publish()
        next(iter(transport.plane.hosts.values())).crash()
        yield client, transport


async def seen_twice(transport: MemoryTransport) -> dict[str, Any]:
    """Look twice, since rates are of the time between two reports."""
    async with stack(MemoryTransport(transport.attach_config(), bootstrap=False)) as looker:
        overviews = Overviews(looker)
        return await overviews.look()


@pytest.mark.anyio
async def test_it_sees_the_plane_and_its_clients() -> None:
    """Partitions by version, claims by owner, hosts, ports, retries by reason; what is wrong stands first."""
    async with under_faults() as (client, transport):
        seen = await seen_twice(transport)
        (partition,) = seen["partitions"]
        assert (partition["partition"], partition["samples"], partition["groups"]) == ("p[red]", 6, 3)
        assert [one["version"] for one in partition["versions"]] == [2, 1, 0]
        assert [host["state"] for host in seen["hosts"]] == ["silent", "answers"]
        (claim,) = seen["claims"]
        assert (claim["owner"], claim["samples"], claim["task"]) == (client.owner, 2, "train")
        (port,) = seen["ports"]
        assert (port["health"], port["clients"]) == ("quarantined", 1)
        assert [one["reason"] for one in seen["retries"]] == ["DataPlaneUnavailable"]
        assert [one["owner"] for one in seen["clients"]] == [client.owner]
        assert seen["wrong"][0] == "Host host-0 does not answer: its rows cannot be read."
        assert any("is quarantined by 1 client, for" in line for line in seen["wrong"])
        json.dumps(seen)


def test_lost_rows_are_told_with_what_helps() -> None:
    """What brings rows back stands first; a storage unit of TransferQueue does not come back."""
    host = {"host": "h", "state": "silent", "capacity_bytes": None, "used_bytes": None, "supervised": False}
    nothing = dict.fromkeys(("claims", "clients", "ops", "ports", "retries"), ())
    slots = {"ready": 1}
    for hosts, help_ in (
        ([{"slots": slots, "supervised": True}, {"slots": slots, "state": "answers"}], "wait until their host"),
        ([{"slots": slots}], "start their host again under its name"),
        ([{"slots": slots, "state": "answers"}], "look again in a few seconds"),
        ([], "look again in a few seconds"),
        ([{"slots": {}}], "their storage unit does not come back"),
    ):
        seen = {**nothing, "plane": {"answers": True}, "hosts": [{**host, **one} for one in hosts]}
        lost = _wrong({**seen, "partitions": [{"partition": "p", "lost": 2}]})[-1]
        assert lost.startswith(f"2 rows of partition p cannot be read: {help_}")
        assert ("as a last resort, asyncdp evict p --lost gives" in lost) is ("storage" not in help_)
        assert lost.endswith("asyncdp evict p --lost gives them up.")


def test_a_host_that_is_started_again_is_told() -> None:
    """Its rows cannot be read until then."""
    host = {"host": "h", "state": "silent", "capacity_bytes": None, "slots": {}, "supervised": True}
    nothing = dict.fromkeys(("claims", "clients", "ops", "ports", "retries", "partitions"), ())
    assert _wrong({**nothing, "plane": {"answers": True}, "hosts": [host]}) == [
        "Host h does not answer: its rows cannot be read until its supervisor has started it again."
    ]


def test_ports_of_a_host_are_one_sentence() -> None:
    """With the most clients and the longest time of them; one that is tried again is none."""
    ports = [
        {"host": "h", "port": port, "health": health, "clients": clients, "left_s": left_s}
        for port, health, clients, left_s in (
            (10, "quarantined", 1, 3.0),
            (9, "quarantined", 2, 1.0),
            (8, "half_open", 3, 9.0),
        )
    ]
    assert list(_quarantines(ports)) == ["Ports 9, 10 of h are quarantined by 2 clients, for 3.0 s more."]


@pytest.mark.anyio
async def test_rates_are_of_the_time_between_two_reports() -> None:
    """Calls and failures a second, and durations of what was done meanwhile."""
    async with stack(MemoryTransport()) as client:
        overviews = Overviews(client)
        first = ClientReport("o", at=1e10, ops={"put": {"ok": 10}}, times={"put": {"40": 10}})
        then = ClientReport("o", at=1e10 + 2, ops={"put": {"ok": 30, "error": 4}}, times={"put": {"40": 10, "8": 24}})
        overviews._of_clients([first])
        (put,) = overviews._of_clients([then])["ops"]
        assert (put["op"], put["per_s"], put["failed_per_s"]) == ("put", 12.0, 2.0)
        assert put["p99_ms"] < 1.0


@pytest.mark.anyio
async def test_waiting_is_no_failure_and_clients_that_are_silent_are_one_line() -> None:
    """A claim that found too little in its time is no failed call; who published nothing is told last, by name."""
    async with stack(MemoryTransport()) as client:
        overviews = Overviews(client)
        overviews._of_clients([ClientReport(name, at=1e10) for name in "ab"])
        ops = {"claim_meta": {"ok": 1, "timeout": 9}, "depth": {"timeout": 4}}
        seen = overviews._of_clients([ClientReport(name, at=1e10 + 2, ops=ops) for name in "ab"])
        assert {one["op"]: one["failed_per_s"] for one in seen["ops"]} == {"claim_meta": 0, "depth": 4}
        seen = {**overviews.latest, **seen, "plane": {"answers": True}}
        assert _wrong(seen) == ["4 calls of depth fail each second, of 4."]
        for silent in seen["clients"]:
            silent["silent_s"] = 30.0
        assert _wrong(seen)[1:] == ["2 clients have published nothing for 30 s: a, b."]


@pytest.mark.anyio
async def test_a_plane_that_ends_is_told_beside_the_last_view() -> None:
    """It goes on looking."""
    transport = MemoryTransport()
    async with stack(transport) as client, stack(MemoryTransport(transport.attach_config(), bootstrap=False)) as looker:
        await client.register_partition("p", ["x"], 1, ["t"])
        overviews = Overviews(looker)
        assert (await overviews.look())["wrong"] == []
        await client.close()
        seen = await overviews.look()
        assert seen["wrong"][0].startswith("The plane does not answer: DataPlaneUnavailable")
        assert [one["partition"] for one in seen["partitions"]] == ["p"]


@pytest.mark.anyio
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [12, 24, 1000])
async def test_the_screen_fits_the_terminal(width: int, height: int) -> None:
    """Nothing is wider; what is wrong is always there in full; names are as they are; what has no room is named."""
    seen = await seen_under_faults()
    seen["ops"] = [{"op": "put", "per_s": 1.5, "failed_per_s": 0, "p50_ms": 0.2, "p90_ms": 20, "p99_ms": 20000}]
    out = console(width=width, file=io.StringIO())
    out.print(screen(seen, width, height))
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("! Host host-0 does not answer")
    assert all(wrong in " ".join(" ".join(lines).split()) for wrong in seen["wrong"])
    assert (height == 1000) != any(line.startswith("no room for: ") and "Clients" in line for line in lines)
    if height == 1000:
        assert [line for line in lines if line in SECTIONS] == list(SECTIONS)
        assert any("p[red]" in line for line in lines)
    elif width == 120:
        assert len(lines) <= height


def test_the_page_holds_all_it_needs_and_is_served_on_loopback() -> None:
    """Nothing is loaded from elsewhere; a page of another site cannot ask by its own name."""
    text = PAGE.read_text()
    for word in ("http://", "https://", "src=", "@import", "innerHTML"):
        assert word not in text
    server = serve_page("127.0.0.1", 0, lambda: {"wrong": ["<b>"]})
    try:
        base = f"http://127.0.0.1:{server.server_address[1]}"
        with urllib.request.urlopen(f"{base}/", timeout=30) as got:
            assert got.read().decode() == text
            assert "default-src 'none'" in got.headers["Content-Security-Policy"]
        with urllib.request.urlopen(f"{base}/state.json", timeout=30) as got:
            assert json.loads(got.read()) == {"wrong": ["<b>"]}
        for path, host in (("/state.json", "evil.example:80"), ("/other", "127.0.0.1:1")):
            asked = urllib.request.Request(f"{base}{path}", headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(asked, timeout=30)
    finally:
        server.shutdown()
        server.server_close()


async def seen_under_faults() -> dict[str, Any]:
    """What is seen of a plane in trouble."""
    async with under_faults() as (_, transport):
        return await seen_twice(transport)


@pytest.mark.slow
def test_the_page_in_a_browser() -> None:
    """In Chromium, at 1280 px and on a phone: what is wrong first, names as text, nothing wider than the window."""
    if PROGRAM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    seen = anyio.run(seen_under_faults)
    seen["clients"][0]["owner"] = name = "<b>worker</b>" + "-0123456789" * 12
    seen["wrong"].append(f"Client {name} has published nothing for 30 s.")
    server = serve_page("127.0.0.1", 0, lambda: seen)
    try:
        with chromium() as page:
            for width in (1280, 390):
                page.open(f"http://127.0.0.1:{server.server_address[1]}/", width, until='document.querySelector("h2")')
                assert page.value("innerWidth") == width
                assert page.value("document.documentElement.scrollWidth") <= width
                assert page.value("[...document.querySelectorAll('.wrong')].map(e => e.textContent)") == seen["wrong"]
                assert page.value("document.querySelector('main').firstChild.className") == "wrong"
                titles = page.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
                assert titles == [title for title in SECTIONS if title != "Calls" or seen["ops"]]
                assert page.value("document.querySelectorAll('b').length") == 0
    finally:
        server.shutdown()
        server.server_close()


def test_the_command_prints_once(tmp_path: Path) -> None:
    """As a table or as JSON; a plane that is not there is told, and the code is 3."""
    client = stack(MemoryTransport())
    file = tmp_path / "plane.json"
    file.write_text(json.dumps(client.attach_config()))
    env = {"ASYNCDP_CONFIG": str(file), "COLUMNS": "80"}

    async def fill() -> None:
        await client.register_partition("p", ["x"], 1, ["t"])

    anyio.run(fill)
    done = CliRunner().invoke(app, ["top", "--once"], env=env)
    assert (done.exit_code, "nothing is wrong" in done.stdout, "host-1" in done.stdout) == (0, True, True)
    assert json.loads(CliRunner().invoke(app, ["top", "--json"], env=env).stdout)["wrong"] == []
    anyio.run(client.close)
    for option in ("--once", "--json"):
        done = CliRunner().invoke(app, ["top", option], env=env)
        said = (done.stdout + done.stderr).replace("DOES NOT ANSWER", "does not answer")
        assert (done.exit_code, "Traceback" in said, "no memory plane answers" in said) == (3, False, True)


# -- what clients publish


@pytest.mark.anyio
async def test_a_report_is_bounded_and_is_withdrawn() -> None:
    """Whatever a client has counted; a text that is no report is left out; nobody publishing is no error."""
    async with stack(MemoryTransport()) as client:
        assert await read_reports(client) == []
        big = ClientReport("o", at=1.0, ports=[(f"h{n}", n, "quarantined", 1.0) for n in range(9999)])
        assert len(big.to_text()) <= LONGEST
        assert ClientReport.from_text(big.to_text()) == ClientReport("o", at=1.0)
        for text in ("{}", "[]", "x", None, '{"owner": 1, "at": 2}'):
            assert ClientReport.from_text(text) is None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Publisher(client).run)
            with anyio.fail_after(60):
                while not await read_reports(client):  # noqa: ASYNC110 - there is no event for it
                    await anyio.sleep(0.01)
            (report,) = await read_reports(client)
            assert (await PlaneWatch(client).ask()).partitions == []
            assert (report.owner, report.ops["register"]["ok"]) == (client.owner, 1)
            tasks.cancel_scope.cancel()
        assert await client.list_metadata(PARTITION) == []


@pytest.mark.slow
@pytest.mark.anyio
async def test_publishing_never_fails() -> None:
    """Where the plane does not answer it tells nothing; where it is back, it goes on."""
    plan = FaultPlan().on("register_partition").refuse()
    async with stack(MemoryTransport(), [*default_layers(backoff_base_s=0.001), plan.layer]) as client:
        assert not await Publisher(client).publish()
        assert list(layers_of(client))
