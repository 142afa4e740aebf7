"""What puts and gets cost on UCXX: over UCX and over shared memory, beside a plain copy and UCX alone, in one run.

    python -m benchmarks ucxx [--rounds 9] [--quick]

Slot hosts, a directory, UCX's other end and idle clients are processes of their own. Works are measured in turns and
compared round by round; all numbers are medians. ``x memcpy`` and ``x raw ucx``: how fast it is beside a copy between
two arrays that are used again and again, and beside messages of UCX alone (1.00: as fast). UCX listeners bind to every
address of the machine, so all of it runs in a network namespace of its own where one can be had; where none can be
had, ``--here`` runs it where it is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from typing import Any

import torch

from asyncdp.transports.ucxx.wire.engine import Engine
from benchmarks._ucxx_idle import Idlers
from benchmarks._ucxx_plane import Plane
from benchmarks._ucxx_raw import raw_peer
from benchmarks._ucxx_slots import KIB, MIB, SECRET, Slots, host
from benchmarks._ucxx_table import Rounds, line

LAYOUTS = ((256, 64 * KIB), (1, MIB), (1, 16 * MIB), (1, 64 * MIB))
NAMESPACE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def aims(rounds: Rounds) -> None:
    """Print how far the first aims are reached."""
    line("aims, for 256 x 64 KiB", "reached", "aim")
    for verb in ("get", "put"):
        ratio = rounds.ratio(f"{verb}, ucx", f"{verb}, ucx, a request per slot")
        line(f"{verb} over ucx beside a request per slot", f"{ratio:.1f} x", ">= 5 x")
    for verb in ("get", "put"):
        alone = f"{verb}, the lane's copy alone"
        line(f"{alone}, of memcpy", f"{rounds.ratio(alone, 'memcpy'):.2f}", ">= 0.5")


async def slots(told: dict[str, Any], rounds: int, *, quick: bool) -> None:
    """Measure slots of all layouts."""
    engine = Engine(devices="lo")
    bench = Slots(told, engine, rounds)
    async with raw_peer(engine) as raw:
        made = [await bench.layout(n, size, raw) for n, size in (LAYOUTS[:2] if quick else LAYOUTS)]
    aims(made[0])
    bench.pool.close()
    await engine.close()


async def plane(rounds: int) -> None:
    """Measure whole calls."""
    made = Plane(rounds)
    try:
        await made.shares()
    finally:
        await made.close()


def main() -> int:
    """Measure, in a namespace where that can be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each measurement")
    parser.add_argument("--quick", action="store_true", help="the two small layouts and few rounds only")
    parser.add_argument("--here", action="store_true", help="not in a namespace: UCX listeners bind everywhere")
    args = parser.parse_args()
    if not args.here:
        if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
            print("no network namespace can be had; UCX listeners would bind to all addresses: --here does it anyway")
            return 1
        told = ["--here", "--rounds", str(args.rounds), *(["--quick"] if args.quick else [])]
        env = {"UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n", "OMP_NUM_THREADS": "1", **os.environ}
        command = [*NAMESPACE, sys.executable, "-m", "benchmarks", "ucxx", *told]
        return subprocess.run(command, env=env, check=False).returncode
    os.environ["ASYNCDP_SECRET"] = SECRET
    rounds = 3 if args.quick else args.rounds
    torch.set_num_threads(1)
    idlers = Idlers()
    try:
        with host() as (told, pid):
            idlers.measure(told, pid)
            asyncio.run(slots(told, rounds, quick=args.quick))
    finally:
        idlers.close()
    asyncio.run(plane(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
