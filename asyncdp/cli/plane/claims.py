"""The commands ``asyncdp claims`` and ``asyncdp release``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..attached import ConfigFile, Json, Partition, TimeoutS, Yes, ask, confirmed, fail, print_json
from ..tables import age, count, cut, print_table

if TYPE_CHECKING:
    from asyncdp.client import Client
    from asyncdp.meta import ClaimInfo

__all__ = ["claims", "release"]

#: Most characters of a claim id that a table shows.
CLAIM_ID = 24


async def claims_of(client: Client, partition: str, task: str | None, timeout_s: float) -> list[ClaimInfo]:
    """Return the live claims of one task, or of all of a partition's, oldest first."""
    tasks = (task,) if task else (await client.describe(partition, timeout_s=timeout_s)).consumer_tasks
    found = [claim for name in tasks for claim in await client.list_claims(partition, name, timeout_s=timeout_s)]
    return sorted(found, key=lambda claim: claim.claimed_at)


def claims(
    partition: Partition,
    *,
    task: Annotated[str | None, typer.Option(help="Only the claims of this task.")] = None,
    config: ConfigFile = None,
    timeout: TimeoutS = 30.0,
    as_json: Json = False,
) -> None:
    """List the live claims of a partition, oldest first: who holds which samples, and for how long."""
    found = ask("claims", config, lambda client: claims_of(client, partition, task, timeout))
    if as_json:
        print_json([asdict(claim) for claim in found])
        return
    if not found:
        typer.echo("no claims")
        return
    now = time.time()
    columns = ("task", "owner", "samples", "age", "expires in", "claim")
    rows = [
        (
            *(claim.task_name, claim.owner, count(len(claim.sample_ids)), age(now - claim.claimed_at)),
            "never" if claim.expires_at is None else age(claim.expires_at - now),
            cut(claim.claim_id, CLAIM_ID),
        )
        for claim in found
    ]
    print_table(columns, rows, right=("samples", "age", "expires in"))


def release(
    partition: Partition,
    *,
    owner: Annotated[str, typer.Option(help="Owner of the claims, as 'asyncdp claims' shows it.")],
    yes: Yes = False,
    config: ConfigFile = None,
    timeout: TimeoutS = 30.0,
    as_json: Json = False,
) -> None:
    """Release all claims of one owner, such as a consumer that died, so that its samples can be claimed again."""
    found = ask("release", config, lambda client: claims_of(client, partition, None, timeout))
    held = [claim for claim in found if claim.owner == owner]
    if not held:
        others = sorted({claim.owner for claim in found})
        there = f"those that hold claims are {', '.join(others)}" if others else "nobody holds a claim there"
        fail("release", f"{owner!r} holds no claim in {partition!r}; {there}")
    samples = sum(len(claim.sample_ids) for claim in held)
    what = f"{len(held)} claim{'s' * (len(held) != 1)} of {owner!r} on {count(samples)} samples"
    confirmed("release", f"Release {what}? If it lives, it and another consumer may train on them.", yes=yes)
    ask("release", config, lambda client: client.release_claims(partition, owner, timeout_s=timeout))
    if as_json:
        print_json({"partition_id": partition, "owner": owner, "claims": len(held), "samples": samples})
    else:
        typer.echo(f"released {what}")
