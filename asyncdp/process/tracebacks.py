"""Shortens what an uncaught error prints to the verb, the text of the cause, and the last frame of each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["FULL", "shorten"]

#: Environment variable; if it is 1, errors keep all their frames and causes, in every process that inherits it.
FULL = "ASYNCDP_FULL_TRACEBACKS"


def shorten(err: BaseException, at: FrameType | None = None) -> None:
    """Reduce the traceback of an error, and those of its causes and contexts, to the frame that raised each of them.

    Only the direct cause is printed; further ones stay in ``__context__``, for a debugger. The layers and libraries
    between a verb and a socket are some sixty frames, which also keep the tensors of the call alive.

    Args:
        err: The error, about to be raised once more.
        at: The frame that will raise it, which is left out since raising adds it again.
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
