"""The cancellation sweep: cancels a verb at each of its checkpoints and looks at what is left.

::

    from asyncdp.testing import run_virtual
    from asyncdp.testing.contract import by_config
    from asyncdp.testing.sweep import cancellation_sweep

    async def main() -> None:
        swept = await cancellation_sweep(by_config(MyTransport), "put_samples")
        print(swept)  # put_samples: 12 steps, 36 cancels (native 12, scope 12, wait_for 12), 0 ended earlier

    run_virtual(main)

A real transport polls, so that two runs of a verb have different numbers of checkpoints: ``polls=True`` then.
"""

from __future__ import annotations

from asyncdp.testing.sweep.leftovers import leftovers
from asyncdp.testing.sweep.sweep import Swept, cancellation_sweep
from asyncdp.testing.sweep.verbs import VERBS, SweptVerb
from asyncdp.testing.sweep.ways import WAYS

__all__ = ["VERBS", "WAYS", "Swept", "SweptVerb", "cancellation_sweep", "leftovers"]
