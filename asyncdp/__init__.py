"""asyncdp: a fault-tolerant async data plane client for reinforcement-learning post-training."""

from typing import Final

__all__ = ["__version__"]

if __name__ != "asyncdp":
    # Two copies of the package under two names would mean two error trees: `except DataPlaneError` would miss half of them.
    msg = f"this package is imported as 'asyncdp', not as {__name__!r}"
    raise ImportError(msg)

__version__: Final = "0.1.0"
