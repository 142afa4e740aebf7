"""Configuration of the directory's client."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["DirectorySettings"]

Positive = Annotated[int, msgspec.Meta(ge=1)]
#: A namespace is the prefix of keys before a colon, and part of patterns in the server's access rules.
Namespace = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class DirectorySettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Configuration of the directory's client.

    Attributes:
        namespace: Prefix of all keys; planes that share a server have different ones.
        max_connections: Most connections; further calls wait for one. The server has one thread, so more do not help.
        connect_timeout_s: Seconds that connecting may take; much longer than a local handshake, shorter than a call.
        check_idle_s: Seconds after which an idle connection is checked for an end of file before it is used again.
        sync_clock_s: Seconds between two measurements of the server's clock. Clocks drift by up to 50 us a second.
        host_timeout_s: Seconds without a heartbeat after which a slot host gets no puts and its rows count as lost.
        host_forget_s: Seconds without a heartbeat after which ``reap`` removes a slot host's registration.
        directory_timeout_s: Seconds after the first failure for which calls wait for a directory that this client has
            reached before; they always wait for a supervised one.
        capacity_age_s: Greatest age in seconds of the count of samples in other partitions when a put checks capacity.
        list_rows: Rows per page of a listing; between pages the server handles other requests.
        wake_s: Longest interval in seconds at which a waiting claim polls: a notice can be lost with its connection,
            and the end of a lease sends none.
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
        """Refuse a ``host_forget_s`` below ``host_timeout_s``, which would remove hosts that still count as alive."""
        if self.host_forget_s < self.host_timeout_s:
            raise ValueError(
                f"host_forget_s: {self.host_forget_s:g} s is shorter than host_timeout_s ({self.host_timeout_s:g} s):"
                " hosts that still serve would be removed"
            )
