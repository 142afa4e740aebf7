"""Why a run ended before its time, in one line."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import NamedTuple, cast

__all__ = ["Failure", "leaves", "said", "why_it_ended"]


class Failure(NamedTuple):
    """What the process of a role says last, if it fails."""

    why: str


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group of errors, however deep; one that is no group is its own."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error


def said(error: BaseException) -> str:
    """Say it in a line: of several errors the first, since the others follow from it as a rule."""
    first = next(leaves(error))
    text = " ".join(str(first).split())
    return text if isinstance(first, RuntimeError) and text else f"{type(first).__name__}: {text}".rstrip(": ")


def why_it_ended(exit_code: int | None) -> str:
    """Say what an exit code means."""
    if exit_code is None:
        return "it does not end"
    if exit_code < 0:
        return f"it was killed by {signal.Signals(-exit_code).name}"
    return f"it ended with code {exit_code}"
