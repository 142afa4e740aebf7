"""Stacks with fault injection."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from asyncdp.factory import default_layers, stack

if TYPE_CHECKING:
    from asyncdp.calls import Clock
    from asyncdp.client import Client

    from .plan import FaultPlan

__all__ = ["faulty_stack"]


def faulty_stack(
    transport: Any,
    plan: FaultPlan,
    *,
    by_layer: Mapping[str, Mapping[str, Any]] | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    on_event: Callable[[Any], None] | None = None,
    call_timeout_s: float | None = None,
    claim_poll_s: float | None = None,
    **settings: Any,
) -> Client:
    """Build a client of a transport with the default layers and, below them, the fault layer of a plan.

    ::

        plan = FaultPlan(seed=7).on("get_samples").refuse(times=1)
        client = faulty_stack(MemoryTransport(), plan, attempt_timeout_s=1.0)

    Args:
        transport: See :func:`~asyncdp.layering.stack`.
        plan: The fault plan.
        by_layer: Settings of the layers, as :func:`~asyncdp.layering.default_layers` takes them.
        clock: As ``stack()`` takes it.
        rng: As ``stack()`` takes it; None: backoff and rotation are seeded by the plan.
        on_event: As ``stack()`` takes it.
        call_timeout_s: As ``stack()`` takes it.
        claim_poll_s: As ``stack()`` takes it.
        **settings: Settings of the layers, by name.

    Raises:
        ValueError: No layer has that setting, or the plan does not fit the transport.
    """
    return stack(
        transport,
        [*default_layers(by_layer, **settings), plan.layer],
        clock=clock,
        rng=rng or random.Random(plan.seed),  # noqa: S311 - jitter
        on_event=on_event,
        call_timeout_s=call_timeout_s,
        claim_poll_s=claim_poll_s,
    )
