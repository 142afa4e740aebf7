"""Settings of the directory's client."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["DirectorySettings"]

Positive = Annotated[int, msgspec.Meta(ge=1)]
#: A namespace is a prefix of keys, ended by a colon, and part of patterns in the server's access rules.
Namespace = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class DirectorySettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a client uses the directory.

    Attributes:
        namespace: Prefix of all keys; planes that share a server have different ones.
        max_connections: Connections at most; further calls wait for one. The server is one thread: more do not help.
        connect_timeout_s: How long connecting may take. Longer than a local handshake by far, shorter than a call.
        check_idle_s: A connection idle for longer is looked at for an end of file before it is used again.
        sync_clock_s: How often the server's clock is measured anew. Clocks of machines drift by up to 50 us a second.
        host_timeout_s: A slot host silent for longer gets no puts, and its rows count as lost.
        host_forget_s: A slot host silent for longer is struck off by ``reap``.
        directory_timeout_s: A directory that this client has reached is expected to come back for so long after it was
            first missed; later calls do not wait for it any more. Where it is supervised it always is.
        capacity_age_s: How old the count of samples in other partitions may be when a put checks the capacity.
        list_rows: Rows per page of a listing; 4096 keep the server busy for about 10 ms.
        wake_s: Longest wait of a claim between two looks where no notice comes: a notice can be lost with its
            connection, and a lease ends without one.
    """

    namespace: Namespace = "asyncdp"
    max_connections: Positive = 32
    connect_timeout_s: Seconds = 5.0
    check_idle_s: Seconds = 0.05
    sync_clock_s: Seconds = 30.0
    host_timeout_s: Seconds = 5.0
    host_forget_s: Seconds = 600.0
    directory_timeout_s: Seconds = 30.0
    capacity_age_s: float = 1.0
    list_rows: Positive = 4096
    wake_s: Seconds = 0.5

    def __post_init__(self) -> None:
        """Refuse to strike off hosts that do not count as silent yet."""
        if self.host_forget_s < self.host_timeout_s:
            raise ValueError(
                f"host_forget_s: {self.host_forget_s:g} s is shorter than host_timeout_s ({self.host_timeout_s:g} s):"
                " hosts that still serve would be struck off"
            )
