"""The controller of docs/testing.md survives what planes do to controllers."""

import re
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncdp import DataPlaneNotReady, DataPlaneUnavailable, MemoryTransport
from asyncdp.testing import FaultPlan, faulty_stack, run_virtual

TEXT = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
LOADING = {"retry_after_s": 0.1, "blames_port": False}
BACKENDS = ["asyncio", "trio"]


def controller(plane: Any, oldest: int) -> Any:
    """Make the controller of the page."""
    names: dict[str, Any] = {}
    exec(re.search(r"^```python\n# controller\.py\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1], names)  # type: ignore[index]
    return names["SingleController"](plane, oldest)


def every_verb(error: type[Exception], attributes: dict[str, Any]) -> FaultPlan:
    """Answer every call for a minute with this error."""
    return FaultPlan().error(error, "not now", attributes=attributes, at_s=10, for_s=60)


PLANS = {
    "loading, busy, read-only": every_verb(DataPlaneUnavailable, LOADING),
    "out of memory": every_verb(DataPlaneNotReady, {"retry_after_s": 0.5}),
    "only evict is refused": FaultPlan().on("evict").error(DataPlaneNotReady, "full", at_s=10, for_s=60),
    "rows lost with a unit": FaultPlan().crash_host("host-0", at_s=10),
    "nothing answers": FaultPlan().silent(at_s=10, for_s=60),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PLANS)
def test_the_controller_outlives(name: str, backend: str) -> None:
    """Whatever the plane says for a minute, the controller goes on afterwards, and has removed what it should."""

    async def check() -> None:
        async with faulty_stack(MemoryTransport(), PLANS[name].fresh()) as plane:
            await plane.register_partition("rollouts", ["x"], 16, ["train"])
            for version in range(6):
                tags = [{"weight_version": version}]
                await plane.put_samples([f"s{version}"], "rollouts", {"x": torch.zeros(1)}, tags)
            await plane.put_samples(["untagged"], "rollouts", {"x": torch.zeros(1)})
            one = controller(plane, oldest=0)
            async with anyio.create_task_group() as group:
                group.start_soon(one.run, 200)
                await anyio.sleep(30)
                one.oldest = 3
            left = await plane.list_metadata("rollouts")
            assert all(g.weight_version is not None and g.weight_version >= 3 and not g.lost_keys for g in left)
            assert left or name == "rows lost with a unit"
            assert (one.outages > 0) == (name != "rows lost with a unit")

    run_virtual(check, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_timeout_is_one_of_its_errors(backend: str) -> None:
    """Calls that get no time fail as those of a plane that is away: it pauses, and goes on when they get some."""

    async def check() -> None:
        async with faulty_stack(MemoryTransport(), FaultPlan()) as plane:
            await plane.register_partition("rollouts", ["x"], 16, ["train"])
            await plane.put_samples(["old"], "rollouts", {"x": torch.zeros(1)}, [{"weight_version": 0}])
            one = controller(plane, oldest=3)
            usual, plane.call_timeout_s = plane.call_timeout_s, 0.0
            await one.run(30)
            assert 10 <= one.outages <= 31
            for call in (plane.ping(timeout_s=0), plane.claim_meta("rollouts", "train", ["x"], 9, timeout_s=0)):
                with pytest.raises(one.step.__globals__["AWAY"]):
                    await call
            plane.call_timeout_s = usual
            await one.run(30)
            assert await plane.list_metadata("rollouts") == []

    run_virtual(check, backend)
