"""The TransferQueue transport: TransferQueue's controller runs our directory, its storage units hold our rows.

Needs the extra ``asyncdp[tq]``. Its guarantees are described in docs/transfer_queue.md.
"""

import importlib.util

if importlib.util.find_spec("transfer_queue") is None:
    # It is not imported here: that takes seconds, and environment variables have to be set first.
    raise ImportError("No module named 'transfer_queue'")

from .transport import TQTransport

__all__ = ["TQTransport"]
