"""What is tested here depends on the extras that are installed."""

from __future__ import annotations

import importlib.util

collect_ignore: list[str] = []
if importlib.util.find_spec("transfer_queue") is None:
    collect_ignore += ["test_mooncake.py", "test_transfer_queue.py"]
