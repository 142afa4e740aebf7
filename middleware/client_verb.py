"""One verb of a client of another project."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Self

__all__ = ["ClientVerb"]


class ClientVerb(NamedTuple):
    """A bound method and its signature; ``signature`` is None if it cannot be determined."""

    method: Callable[..., Any]
    is_async: bool
    signature: inspect.Signature | None

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Self:
        """Inspect a method."""
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            signature = None
        return cls(method, inspect.iscoroutinefunction(method), signature)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise TypeError, without a call, if the signature does not accept these arguments."""
        if self.signature is not None:
            self.signature.bind(*args, **kwargs)

    def takes(self, name: str) -> bool | None:
        """Return whether the method accepts a keyword argument of that name; None if that is not known."""
        if self.signature is None:
            return None
        parameters = self.signature.parameters
        if name in parameters:
            return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
        return any(p.kind is p.VAR_KEYWORD for p in parameters.values())
