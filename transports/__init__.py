"""The backends: where the bytes go.

The code lies in the top-level folder `transports`; its only import name is `asyncdp.transports`.
"""

if __name__ != "asyncdp.transports":
    # In a checkout the folder is on sys.path too. Loaded under both names, each class would exist twice and
    # isinstance would fail between the copies.
    raise ImportError(f"{__name__!r} is not an import name of its own: import asyncdp.transports instead")
