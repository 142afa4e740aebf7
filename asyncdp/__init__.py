"""asyncdp: a fault-tolerant async data plane client for reinforcement-learning post-training."""

from typing import Final

__all__ = ["__version__"]

if __name__ != "asyncdp":
    # Loaded under two names there would be two error trees: `except DataPlaneError` would miss half of what is raised.
    raise ImportError(f"this package is imported as 'asyncdp', not as {__name__!r}")

__version__: Final = "0.1.0"
