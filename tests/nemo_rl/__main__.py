"""Runs NeMo-RL's own tests of its data plane on asyncdp, and prints a table by file: ``make nemo NEMO=path``.

The checkout is read, not changed, and nothing of it is committed here. Its tests run in a process of their own, with
its ``conftest.py`` left out (which starts a Ray cluster and asks for GPUs) and ``drop_in.py`` in its place.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOW = """\
NeMo-RL's sources are needed beside this project, for instance of the release that docs/nemo_rl.md was measured with:
    git clone https://github.com/NVIDIA-NeMo/RL nemo-rl && git -C nemo-rl checkout 7ea279abfbeb
    make nemo NEMO=nemo-rl            (ARGS="--impl ucxx": on ucxx; also transfer_queue; default: memory)"""
#: Test files, by folder below tests/unit.
FILES = {
    "data_plane": (
        *("test_codec_jagged.py", "test_codec_mooncake.py", "test_codec_wire_stripped.py", "test_correctness.py"),
        *("test_factory.py", "test_interface_contract.py", "test_kvbatchmeta.py", "test_message_log_decompose.py"),
        *("test_observability.py", "test_preshard_extras.py", "test_seqpack_equivalence.py", "test_smoke.py"),
        *("test_sync_one_hop.py", "test_tq_lifecycle.py", "test_writeback_pipeline_e2e.py", "test_leader_broadcast.py"),
        *("test_architecture_invariants.py", "test_local_node_ip.py"),
    ),
    "single_controller": ("test_tq_replay_buffer.py", "test_sampler_interface.py"),
}


def main() -> int:
    """Run them; return 1 if a test failed, 2 if there is no checkout. docs/nemo_rl.md says which fail, and why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", default=os.environ.get("NEMO", ""), help="a checkout of NeMo-RL")
    parser.add_argument("--impl", choices=("memory", "transfer_queue", "ucxx"), default="memory")
    parser.add_argument("--helpers", action="store_true", help="asyncdp's codec and preshard functions as well")
    parser.add_argument("-k", default="", help="as pytest's -k")
    options = parser.parse_args()
    checkout = Path(options.checkout).absolute()
    if not options.checkout or not (checkout / "nemo_rl" / "data_plane").is_dir():
        sys.stderr.write(f"{HOW}\n")
        return 2
    names = [f"tests/unit/{folder}/{file}" for folder, files in FILES.items() for file in files]
    files = [name for name in names if (checkout / name).is_file()]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        done = subprocess.run(_command(files, report, options.k), cwd=checkout, env=_environment(options), check=False)
        if not report.exists():
            return done.returncode or 1
        return _told(report, names, files, options.impl)


def _command(files: list[str], report: Path, select: str) -> list[str]:
    plugins = ("drop_in", "no:asyncdp-pytest", "no:cacheprovider", "no:xdist", "no:randomly")
    return [
        *(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--timeout=300",
            "--noconftest",
            "--tb=short",
            "-c",
            os.devnull,
            "--rootdir",
            ".",
        ),
        *(f"-p{name}" for name in plugins),
        *("--junitxml", str(report), "-o", "junit_family=xunit1", "-o", "asyncio_mode=auto", "-k", select, *files),
    ]


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the run: the checkout, this project and the plugin are importable, in this order."""
    paths = (Path(options.checkout).absolute(), HERE, ROOT)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "ASYNCDP_NEMO_IMPL": options.impl,
        "ASYNCDP_NEMO_HELPERS": str(int(options.helpers)),
    }


def _told(report: Path, names: list[str], files: list[str], impl: str) -> int:
    """Print the table, and why tests failed; return 1 if one failed."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    why: list[str] = []
    for case in ET.parse(report).iter("testcase"):
        name = case.get("file") or (case.get("classname") or "").replace(".", "/") + ".py"
        state = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        counts.setdefault(name, Counter())[state] += 1
        if state in ("failure", "error"):
            text = next(child for child in case if child.tag == state).get("message") or ""
            why.append(f"{Path(name).name}::{case.get('name')}: {text.splitlines()[0][:160] if text else ''}")
    lines = [
        f"\nNeMo-RL's tests on asyncdp, impl {impl}",
        "| file | passed | failed | skipped |",
        "| --- | --- | --- | --- |",
    ]
    for name, found in counts.items():
        if not found and name in files:  # all its tests were left out by -k
            continue
        failed = found["failure"] + found["error"]
        absent = "" if name in files else " (not in this checkout)"
        lines.append(
            f"| {name.removeprefix('tests/unit/')}{absent} | {found['passed']} | {failed} | {found['skipped']} |"
        )
    total = sum(counts.values(), Counter[str]())
    failed = total["failure"] + total["error"]
    lines += [f"| in all | {total['passed']} | {failed} | {total['skipped']} |", *why]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
