"""What an uncaught error prints: the verb, the cause's text, and the last frame of each; not every frame between."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["FULL", "shorten"]

#: Set to 1, errors keep all their frames and causes, in every process that inherits the variable.
FULL = "ASYNCDP_FULL_TRACEBACKS"


def shorten(err: BaseException, at: FrameType | None = None) -> None:
    """Leave an error, its cause and what lies behind them one frame each: the one that raised it.

    Of the chain only the direct cause is printed. What is behind that stays in ``__context__``, for a debugger. Layers
    and libraries between a verb and a socket are some sixty frames, which hold the tensors of the call as well.

    Args:
        err: The error, about to be raised once more.
        at: The frame that raises it, which is not kept: it is added again.
    """
    if os.environ.get(FULL, "0") not in ("", "0"):
        return
    seen: set[int] = set()
    left: list[BaseException | None] = [err]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _last(one.__traceback__, at)
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
        if one is not err:
            one.__context__ = one.__cause__ or one.__context__
            one.__cause__ = None
            one.__suppress_context__ = True


def _last(trace: TracebackType | None, at: FrameType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is not None and trace.tb_frame is at else trace
