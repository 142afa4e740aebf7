"""What docs/operations.md shows is what commands print, programs do, and exporters, logs and alerts are called."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from typer.testing import CliRunner

from asyncdp import Client, build_data_plane_client
from asyncdp.cli.app import app
from asyncdp.middleware.fault_log import LEVELS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [code for language, code in FENCE.findall(TEXT) if language == "console"]
PROGRAMS = [code for language, code in FENCE.findall(TEXT) if language == "python"]


async def fill(client: Client) -> None:
    """Put what the document shows."""
    await client.register_partition("rollouts", ["tokens", "reward"], 4096, ["train", "log"], grpo_group_size=4)
    for group in range(6):
        n = 2 if group == 3 else 4
        ids = [f"p{group}_g{i}" for i in range(n)]
        await client.put_samples(ids, "rollouts", {"tokens": torch.zeros(n, 4)}, [{"weight_version": group // 2}] * n)
    await client.claim_meta("rollouts", "train", ["tokens"], 8)


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plane of the document, and its config file in the working directory."""
    client = build_data_plane_client({"enabled": True, "impl": "memory", "owner": "worker-7"})
    (tmp_path / "plane.json").write_text(json.dumps(client.attach_config()))
    monkeypatch.chdir(tmp_path)
    anyio.run(fill, client)
    yield
    anyio.run(client.close)


def masked(text: str) -> list[list[str]]:
    """Return the words of each line, without what differs from run to run: times and ids of claims."""
    text = re.sub(r"\b[0-9a-f]{16}-\d+", "CLAIM", text)
    text = re.sub(r"\d+\.\d (m?s)\b", r"TIME \1", text)
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.splitlines()[0])
@pytest.mark.usefixtures("plane")
def test_a_command_prints_what_is_shown(block: str) -> None:
    """But for times and ids."""
    command, _, shown = block.partition("\n")
    words = command.removeprefix("$ asyncdp ").split()
    done = CliRunner().invoke(app, words, env={"ASYNCDP_CONFIG": "plane.json", "COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert masked(done.stdout) == masked(shown)


@pytest.mark.parametrize("code", PROGRAMS, ids=["publish", "prometheus", "opentelemetry"])
def test_a_program_runs(code: str) -> None:
    """As it stands there."""
    for module, extra in {"prometheus_client": "prometheus", "opentelemetry": "otel"}.items():
        if module in code:
            pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")
    exec(compile(code, "operations.md", "exec"), {"__name__": "__main__"})


def rows_of(heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading."""
    part = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_tables_name_what_there_is() -> None:
    """Metrics with their labels, log lines with their levels, alerts."""
    assert {row[0].strip("`"): row[1] for row in rows_of("Log lines")} == dict(LEVELS)
    alerts = re.findall(r"alert: (\w+)", (ROOT / "docs" / "grafana" / "alerts.yml").read_text())
    assert [row[0].strip("`") for row in rows_of("Alerts")] == alerts
    pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'asyncdp[prometheus]'")
    from asyncdp.metrics.prometheus import METRICS

    told = {row[0].strip("`").removesuffix("_total"): row[1] for row in rows_of("Metrics")}
    assert told == {name: ", ".join(labels) for name, (labels, _) in METRICS.items()}


def test_every_command_is_told() -> None:
    """Those that look at a plane or act on it, and those without a plane."""
    import typer

    group = typer.main.get_command(app)
    names = set(getattr(group, "commands", {}))
    assert names
    for name in names - {"demo", "serve", "directory"}:
        assert f"asyncdp {name}" in TEXT, name
