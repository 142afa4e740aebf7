"""The layers of the stack: what the client survives, and how.

The code lies in the top-level folder `middleware`; its only import name is `asyncdp.middleware`.
"""

if __name__ != "asyncdp.middleware":
    # In a checkout the folder is on sys.path too. Loaded under both names, each class would exist twice and
    # isinstance would fail between the copies.
    raise ImportError(f"{__name__!r} is not an import name of its own: import asyncdp.middleware instead")
