"""The commands that look at a plane, on memory, in the tests' own process: no other can attach to it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from typer.testing import CliRunner, Result

import asyncdp
from asyncdp import ClaimInfo, Client, DataPlaneGroupMeta, build_data_plane_client, layers_of
from asyncdp.cli.app import app
from asyncdp.cli.tables import age, cut, size

arena_file = sys.modules["asyncdp.cli.check.arena"]  # the package's attribute is the command
#: Whether this is a checkout, of which ``asyncdp bench`` runs the benchmarks, and not an installed wheel.
CHECKOUT = (Path(asyncdp.__file__).resolve().parents[1] / "benchmarks").is_dir()
ATTACHED = ("ping", "ls", "ls p", "describe p", "depth p", "claims p", "release p --owner x", "evict p --lost", "hosts")


def run(line: str, *, columns: int = 80, **env: str) -> Result:
    """Run a command; names and values have no spaces here."""
    return CliRunner().invoke(app, line.split(), env={"COLUMNS": str(columns), "ASYNCDP_CONFIG": "", **env})


def told(line: str, **env: str) -> Any:
    """Run a command with --json; return what it printed."""
    done = run(f"{line} --json", **env)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


async def fill(client: Client) -> None:
    """Put four groups of two: one uncommitted, one incomplete, versions 0 to 3; a consumer claims the first."""
    await client.register_partition("p", ["x", "never"], 64, ["train", "log"], grpo_group_size=2)
    for group in range(4):
        ids = [f"g{group}_g{i}" for i in range(1 if group == 3 else 2)]
        tags = [{"weight_version": group, "committed": group != 2}] * len(ids)
        await client.put_samples(ids, "p", {"x": torch.zeros(len(ids), 3)}, tags)
    await client.claim_meta("p", "train", ["x"], 2)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A memory plane with four groups, and the config file of it."""
    client = build_data_plane_client({"enabled": True, "impl": "memory", "owner": "dead-worker"})
    file = tmp_path / "plane.json"
    file.write_text(json.dumps(client.attach_config()))
    anyio.run(fill, client)
    yield SimpleNamespace(client=client, file=file, env={"ASYNCDP_CONFIG": str(file)})
    anyio.run(client.close)


def groups(plane: SimpleNamespace) -> list[DataPlaneGroupMeta]:
    """List the groups of the plane as they are now."""

    async def ask() -> list[DataPlaneGroupMeta]:
        return await plane.client.list_metadata("p")

    return anyio.run(ask)


def held(plane: SimpleNamespace) -> list[ClaimInfo]:
    """List the claims of the plane as they are now."""

    async def ask() -> list[ClaimInfo]:
        return await plane.client.list_claims("p", "train")

    return anyio.run(ask)


# -- what is there


def test_ping_says_that_the_plane_answers(plane: SimpleNamespace) -> None:
    """By --config or by ASYNCDP_CONFIG; --json for programs."""
    done = run(f"ping --config {plane.file}")
    assert (done.exit_code, done.stdout.startswith("the plane answers, after")) == (0, True)
    assert told("ping", **plane.env)["answers"] is True


def test_ls_lists_partitions_and_groups(plane: SimpleNamespace) -> None:
    """Partitions with what they hold; groups with rows, versions, ages, state, lost rows and size."""
    assert run("ls", **plane.env).stdout.splitlines()[1].split() == ["p", "7", "84", "B", "2", "2", "train,", "log"]
    (one,) = told("ls", **plane.env)
    assert (one["partition_id"], one["size"], one["consumer_tasks"]) == ("p", 7, ["train", "log"])
    lines = run("ls p", **plane.env).stdout.splitlines()
    assert lines[0].split() == ["group", "rows", "version", "age", "state", "lost", "size"]
    found = {line.split()[0]: [*line.split()[1:3], line.split()[5]] for line in lines[1:5]}
    assert found == {
        "g0": ["2/2", "0", "complete"],
        "g1": ["2/2", "1", "complete"],
        "g2": ["2/2", "2", "uncommitted"],
        "g3": ["1/2", "3", "incomplete"],
    }
    assert lines[5] == "4 groups, 2 of them ready to train on, 0 rows lost, 84 B"
    assert [group["complete"] for group in told("ls p", **plane.env)] == [True, True, True, False]
    assert run("ls p --limit 1", **plane.env).stdout.splitlines()[-1].startswith("3 more groups (--limit); ")


def test_lost_rows_are_shown(plane: SimpleNamespace) -> None:
    """Rows of a host that is down are lost; hosts says that it is silent."""
    *_, transport = layers_of(plane.client)
    for host in transport.plane.hosts.values():
        host.crash()
    assert "lost rows" in run("ls p", **plane.env).stdout
    assert all(group["lost_keys"] for group in told("ls p", **plane.env))
    assert [host["alive"] for host in told("hosts", **plane.env)] == [False, False]
    assert run("hosts", **plane.env).stdout.count("silent") == 2
    assert run("evict p --lost --yes", **plane.env).exit_code == 0
    assert groups(plane) == []


def test_describe_and_depth(plane: SimpleNamespace) -> None:
    """Types of fields, tasks, sizes; depth is a bare number."""
    done = run("describe p", **plane.env).stdout
    for text in ("p: 7 samples (declared: 64), groups of 2", "payload: 84 B", "train, log", "float32[3]", "nothing"):
        assert text in done
    assert told("describe p", **plane.env)["fields"] == {"x": "float32[3]", "never": ""}
    assert run("depth p", **plane.env).stdout == "2\n"
    assert told("depth p", **plane.env) == {"partition_id": "p", "depth": 2}


def test_hosts_show_ports_slots_and_state(plane: SimpleNamespace) -> None:
    """Each host with what the transport knows; columns that nothing fills are left out."""
    lines = run("hosts", **plane.env, columns=120).stdout.splitlines()
    assert lines[0].split() == ["host", "state", "rows", "slots", "address", "epoch"]
    assert [line.split()[:2] for line in lines[1:]] == [["host-0", "answers"], ["host-1", "answers"]]
    hosts = told("hosts", **plane.env)
    assert [host["ports"] for host in hosts] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert sum(host["slots"]["ready"] for host in hosts) == 4


# -- what is changed


def test_claims_are_listed_and_released(plane: SimpleNamespace) -> None:
    """Who holds which samples; released, they can be claimed again. A wrong owner is told who there is."""
    line = run("claims p", **plane.env).stdout.splitlines()[1].split()
    assert line[:3] == ["train", "dead-worker", "2"]
    (claim,) = told("claims p --task train", **plane.env)
    assert (claim["owner"], claim["sample_ids"]) == ("dead-worker", ["g0_g0", "g0_g1"])
    assert told("claims p --task log", **plane.env) == []
    wrong = run("release p --owner worker --yes", **plane.env)
    assert (wrong.exit_code, wrong.stderr) == (
        1,
        "asyncdp release: 'worker' holds no claim in 'p'; those that hold claims are dead-worker\n",
    )
    unasked = run("release p --owner dead-worker", **plane.env)
    assert unasked.exit_code == 2
    assert "repeat with --yes" in unasked.stderr
    assert len(held(plane)) == 1
    assert run("release p --owner dead-worker --yes", **plane.env).exit_code == 0
    assert held(plane) == []
    assert run("claims p", **plane.env).stdout == "no claims\n"


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("--older-than-version 2", ["g2", "g3"]),
        ("--incomplete", ["g0", "g1", "g2"]),
        ("--older-than-version 1 --incomplete", ["g1", "g2"]),
        ("--lost", ["g0", "g1", "g2", "g3"]),
        ("--older-than-version 9 --older-than 3600", ["g0", "g1", "g2", "g3"]),
        ("--older-than-version 9", []),
    ],
)
def test_evict_removes_the_groups_that_are_named(plane: SimpleNamespace, options: str, left: list[str]) -> None:
    """And no others; a dry run and a run that cannot ask remove nothing."""
    assert run(f"evict p {options} --dry-run", **plane.env).exit_code == 0
    asked = run(f"evict p {options}", **plane.env)
    assert asked.exit_code == (0 if len(left) == 4 else 2)
    assert len(groups(plane)) == 4
    assert run(f"evict p {options} --yes", **plane.env).exit_code == 0
    assert sorted(group.group_id for group in groups(plane)) == left


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--incomplete", "no incomplete groups in 'q'"),
        ("--lost", "no groups with lost rows in 'q'"),
        ("--older-than-version 3", "no groups of versions below 3 in 'q'"),
        ("--lost --incomplete --older-than 5", "no incomplete groups or groups with lost rows that are 5 s old in 'q'"),
    ],
)
def test_evict_says_which_groups_there_are_not(plane: SimpleNamespace, options: str, said: str) -> None:
    """By what was asked for, and in which partition."""
    anyio.run(plane.client.register_partition, "q", ["x"], 8, ["train"])
    assert run(f"evict q {options} --yes", **plane.env).stdout == f"{said}\n"


def test_evict_spares_rows_that_were_put_anew_since_they_were_listed(
    plane: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question and the answer a producer may put the same ids again."""

    async def anew() -> None:
        await plane.client.evict(["g0_g0", "g0_g1"], "p")
        await plane.client.put_samples(["g0_g0", "g0_g1"], "p", {"x": torch.ones(2, 3)}, [{"weight_version": 9}] * 2)

    monkeypatch.setattr("asyncdp.cli.plane.evict.confirmed", lambda *_, **__: anyio.run(anew))
    assert run("evict p --older-than-version 1", **plane.env).exit_code == 0
    assert {group.group_id: group.weight_version for group in groups(plane)}["g0"] == 9


# -- mistakes


@pytest.mark.parametrize("line", ATTACHED)
def test_a_plane_that_is_not_there_is_one_line_and_code_3(tmp_path: Path, line: str) -> None:
    """For each command."""
    file = tmp_path / "plane.json"
    file.write_text('{"enabled": true, "impl": "memory", "controller_address": "memory://gone"}')
    done = run(f"{line} --config {file}")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith(f"asyncdp {line.split(maxsplit=1)[0]}: no memory plane answers at memory://gone")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("{", "is no JSON"),
        ("[]", "holds no mapping"),
        ('{"enabled": true}', "impl: required key is missing"),
        ('{"enabled": true, "impl": "ucx"}', "did you mean 'ucxx'?"),
        ('{"enabled": false, "impl": "ucxx"}', "disabled"),
        ('{"enabled": true, "impl": "ucxx"}', "controller_address: required to attach"),
        ('{"enabled": true, "impl": "memory"}', "controller_address: required to attach"),
    ],
)
def test_a_wrong_config_is_one_line_and_code_2(tmp_path: Path, text: str | None, said: str) -> None:
    """The line names the file and what is wrong with it."""
    file = tmp_path / "plane.json"
    if text is not None:
        file.write_text(text)
    done = run(f"ping --config {file}")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert str(file) in done.stderr
    assert said in done.stderr.lower() or said in done.stderr


def test_other_mistakes_are_one_line_and_code_2(plane: SimpleNamespace) -> None:
    """No config, an unknown partition, no choice of groups."""
    assert "which plane? Name a config file" in run("ls").stderr
    assert run("ls").exit_code == 2
    unknown = run("ls nowhere", **plane.env)
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1)
    assert "nowhere" in unknown.stderr
    assert "did you mean" not in unknown.stderr
    anyio.run(plane.client.register_partition, "rollouts", ["x"], 8, ["train"])
    for line in ("ls", "describe", "depth", "claims", "evict --lost", "release --owner x"):
        near = run(f"{line} rolouts", **plane.env)
        assert (near.exit_code, near.stderr.count("\n")) == (2, 1)
        assert near.stderr.endswith("; did you mean 'rollouts'?\n")
    choice = run("evict p", **plane.env)
    assert (choice.exit_code, "which groups?" in choice.stderr) == (2, True)


def test_yaml_is_read(plane: SimpleNamespace, tmp_path: Path) -> None:
    """By the file's name."""
    pytest.importorskip("yaml", reason="reading YAML needs pyyaml")
    file = tmp_path / "plane.yaml"
    address = json.loads(plane.file.read_text())["controller_address"]
    file.write_text(f"enabled: true\nimpl: memory\ncontroller_address: {address}\n")
    assert run(f"depth p --config {file}").stdout == "2\n"


def test_the_list_of_commands_fits_80_columns(capfd: pytest.CaptureFixture[str]) -> None:
    """No help is cut off; each command has one, with every option in it."""
    lines = run("--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    told_of = [line for line in lines[lines.index("Commands:") + 1 :] if line.strip()]
    assert not [line for line in told_of if line.endswith("...")]
    commands = [line.split()[0] for line in told_of]
    assert len(commands) >= 16
    for name in commands:
        if name == "bench" and not CHECKOUT:
            continue
        shown = run(f"{name} --help", columns=80)
        lines = (shown.stdout or capfd.readouterr().out).splitlines()  # another process shows that of bench
        assert (shown.exit_code, max(map(len, lines)) <= 80) == (0, True), name


# -- configs


def test_config_check_says_what_a_client_would(tmp_path: Path) -> None:
    """Valid with warnings, or the key that is wrong, those of layers, hosts and the directory included."""
    file = tmp_path / "config.json"

    def check(config: dict[str, Any]) -> Result:
        file.write_text(json.dumps({"enabled": True, **config}))
        return run(f"config check {file}")

    assert check({"impl": "memory"}).stdout == f"{file}: valid: memory with backend simple\n"
    attached = check({"impl": "memory", "controller_address": "memory://x"}).stdout
    assert attached.endswith("; names a plane to attach to, which was not asked (asyncdp doctor asks it)\n")
    warned = check({"impl": "ucxx", "controller_address": "redis://h", "ucxx": {"folder": "/x"}})
    assert (warned.exit_code, "warning: ucxx.folder: has no effect" in warned.stdout) == (0, True)
    for config, said in (
        ({"impl": "memory", "layers": {"slot_retry": {"max_attempt": 2}}}, "layers.slot_retry.max_attempt: no such"),
        ({"impl": "memory", "layers": {"slot_retry": {"max_attempts": "2"}}}, "layers.slot_retry.max_attempts"),
        ({"impl": "ucxx", "ucxx": {"host": {"arena_byte": 2}}}, "ucxx.host.arena_byte: no such key"),
        ({"impl": "ucxx", "ucxx": {"directory": {"host_timeout_s": 0.1}}}, "ucxx.host.beat_s"),
        ({"impl": "memory", "call_timeout_s": -1}, "call_timeout_s"),
    ):
        done = check(config)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output
        assert said in done.stderr
    assert json.loads(run(f"config check {file} --json").stdout)["valid"] is False
    assert run("config check /nowhere.json").exit_code == 2


def test_the_schema_has_every_key() -> None:
    """Of the config, its mappings and its layers; it is JSON, and requires two keys only."""
    made = json.loads(run("config schema").stdout)
    top = made["$defs"]["Config"]
    from asyncdp.config import DataPlaneConfig
    from asyncdp.factory import layer_settings

    assert set(DataPlaneConfig.__annotations__) <= set(top["properties"])
    assert top["required"] == ["enabled", "impl"]
    layers = top["properties"]["layers"]["anyOf"][0]["properties"]
    assert {name: set(one["properties"]) for name, one in layers.items()} == {
        name: set(settings) for name, settings in layer_settings().items()
    }


# -- arenas


def test_arenas_that_nobody_serves_are_listed_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a host holds stays, and so does what is no arena unless it is named."""
    from asyncdp.transports.ucxx.slots.arena import PREFIX, SHM, Arena

    names = [f"{PREFIX}test-cli-{kind}-{time.time_ns()}" for kind in ("served", "left", "none")]
    served = Arena.create(names[0], "lives", epoch=1, data_bytes=1 << 16)
    Arena.create(names[1], "died", epoch=2, data_bytes=1 << 16).close()
    (SHM / names[2]).write_bytes(b"no arena")
    (SHM / names[2]).chmod(0o600)
    every = arena_file.segments
    monkeypatch.setattr(arena_file, "segments", lambda: [one for one in every() if one.name in names])
    try:
        found = {one["name"]: (one["host_id"], one["state"]) for one in told("arena ls")}
        assert found == {names[0]: ("lives", "served"), names[1]: ("died", "unserved"), names[2]: ("", "unreadable")}
        assert "1 that nobody serves hold" in run("arena ls").stdout
        assert run("arena rm").exit_code == 2
        assert run("arena rm nothing --yes").exit_code == 2
        refused = run(f"arena rm {names[0]} --yes")
        assert (refused.exit_code, "a slot host serves it" in refused.stderr) == (1, True)
        assert run("arena rm --all").exit_code == 2
        assert run("arena rm --all --yes").stdout == "removed 1 segments\n"
        assert [(SHM / name).exists() for name in names] == [True, False, True]
        assert run(f"arena rm {names[2]} --yes").exit_code == 0
        assert run("arena ls").stdout.count("\n") == 2
    finally:
        served.unlink()
        for name in names:
            (SHM / name).unlink(missing_ok=True)


# -- the rest


def test_bench_says_where_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not beside an installed package."""
    monkeypatch.setattr("asyncdp.__file__", str(tmp_path / "asyncdp" / "__init__.py"))
    done = run("bench layers")
    assert (done.exit_code, "in a checkout of asyncdp only" in done.stderr) == (1, True)


def test_bench_runs_where_it_was_called(tmp_path: Path) -> None:
    """Files that it is told to write lie in the working directory, and its own help is shown."""
    if not CHECKOUT:
        pytest.skip("asyncdp is installed, not a checkout")
    call = [sys.executable, "-m", "asyncdp", "bench"]
    done = subprocess.run([*call, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--compare BEFORE AFTER" in done.stdout
    (tmp_path / "a.json").write_text("[]")
    call += ["--compare", "a.json", "a.json"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "the two runs have no ratio in common\n"


@pytest.mark.parametrize("columns", [80, 120])
def test_no_table_is_wider_than_the_terminal(plane: SimpleNamespace, columns: int) -> None:
    """Whatever it shows."""
    for line in ("ls", "ls p", "describe p", "claims p", "hosts", "doctor", "evict p --incomplete --dry-run"):
        done = run(line, columns=columns, **plane.env)
        assert max(map(len, done.stdout.splitlines())) <= columns, line


def test_quantities_as_text() -> None:
    """Bytes in powers of 1024, ages with the unit that suits them, long texts cut."""
    assert [size(n) for n in (0, 1023, 1024, 150 << 10, 1 << 40, 5000 << 40, None)] == [
        *("0 B", "1023 B", "1.0 KiB", "150 KiB", "1.0 TiB", "5000 TiB", "-")
    ]
    assert [age(s) for s in (-1, 0.44, 12.3, 119, 180, 7300, 172800, None)] == [
        *("0.0 s", "0.4 s", "12 s", "119 s", "3 min", "2 h", "2 d", "-")
    ]
    assert (cut("abc", 3), cut("abcd", 3)) == ("abc", "ab…")
