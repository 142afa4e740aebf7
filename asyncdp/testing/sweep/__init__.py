"""The cancellation sweep: cancels a verb at each of its checkpoints and looks at what is left.

::

    from .. import run_virtual
    from ..contract import by_config
    from . import cancellation_sweep

    async def main() -> None:
        swept = await cancellation_sweep(by_config(MyTransport), "put_samples")
        print(swept)  # put_samples: 12 steps, 36 cancels (native 12, scope 12, wait_for 12), 0 ended earlier

    run_virtual(main)

A real transport polls, so that two runs of a verb have different numbers of checkpoints: ``polls=True`` then.
"""

from __future__ import annotations

from .leftovers import leftovers
from .sweep import Swept, cancellation_sweep
from .verbs import VERBS, SweptVerb
from .ways import WAYS

__all__ = ["VERBS", "WAYS", "Swept", "SweptVerb", "cancellation_sweep", "leftovers"]
