"""One verb of a client that somebody else wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Self

__all__ = ["ClientVerb"]


class ClientVerb(NamedTuple):
    """A bound method, and what is known of it; ``signature`` is None where it cannot be told."""

    method: Callable[..., Any]
    is_async: bool
    signature: inspect.Signature | None

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Self:
        """Look at a method."""
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            signature = None
        return cls(method, inspect.iscoroutinefunction(method), signature)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise TypeError, without a call, if it cannot be called so, as far as that can be told."""
        if self.signature is not None:
            self.signature.bind(*args, **kwargs)

    def takes(self, name: str) -> bool | None:
        """Whether it has a keyword argument of that name; None where that cannot be told."""
        if self.signature is None:
            return None
        parameters = self.signature.parameters
        if name in parameters:
            return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
        return any(p.kind is p.VAR_KEYWORD for p in parameters.values())
