"""The plane on TransferQueue: its controller runs our directory, its storage units hold our rows.

Needs the extra ``asyncdp[tq]``. See docs/transfer_queue.md for what it guarantees and how.
"""

import importlib.util

if importlib.util.find_spec("transfer_queue") is None:
    # Not imported here: that takes seconds, and its knobs have to be set before.
    raise ImportError("No module named 'transfer_queue'")

from .transport import TQTransport

__all__ = ["TQTransport"]
