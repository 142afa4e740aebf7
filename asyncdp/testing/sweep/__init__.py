"""The cancellation sweep: cancels a verb at each of its checkpoints and checks that nothing is left behind.

::

    from asyncdp.testing import run_virtual
    from asyncdp.testing.contract import by_config
    from asyncdp.testing.sweep import cancellation_sweep

    async def main() -> None:
        swept = await cancellation_sweep(by_config(MyTransport), "put_samples")
        print(swept)  # put_samples: 12 steps, 36 cancels (native 12, scope 12, wait_for 12), 0 ended earlier

    run_virtual(main)

On a transport that polls, such as one with real sockets, the number of checkpoints differs from run to run: use
``polls=True`` there.
"""

from __future__ import annotations

from .leftovers import leftovers
from .sweep import Swept, cancellation_sweep
from .verbs import VERBS, SweptVerb
from .ways import WAYS

__all__ = ["VERBS", "WAYS", "Swept", "SweptVerb", "cancellation_sweep", "leftovers"]
