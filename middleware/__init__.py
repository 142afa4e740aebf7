"""The layers of the stack, which handle the failures of transports: retries, timeouts, port rotation, metrics.

The code is in the top-level folder `middleware`; its only import name is `asyncdp.middleware`.
"""

if __name__ != "asyncdp.middleware":
    # In a checkout the folder is on sys.path too. Imported under both names, each class would exist twice, and
    # isinstance would fail between the copies.
    raise ImportError(f"{__name__!r} is not an import name of its own: import asyncdp.middleware instead")
