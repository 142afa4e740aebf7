"""An idle connection to Mooncake's master, which tells that it is dead: Mooncake itself asks on for five seconds."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Line"]

#: Seconds for a connection; a master that takes longer may still be there.
CONNECT_S = 1.0


class Line:
    """A connection on which nothing is sent.

    Args:
        address: ``host:port`` of the master.
    """

    def __init__(self, address: str) -> None:
        """Connect at the first question."""
        host, _, port = address.rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def is_dead(self) -> bool:
        """Return whether nobody listens at the address; False also where that cannot be told in a second."""
        with self._lock:
            if self._socket is not None and _is_open(self._socket):
                return False
            self._close()
            try:
                self._socket = socket.create_connection(self._address, CONNECT_S)
            except TimeoutError:
                return False
            except OSError:
                return True
            self._socket.setblocking(False)  # noqa: FBT003 - there is no keyword
            return False

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        line, self._socket = self._socket, None
        if line is not None:
            with contextlib.suppress(OSError):
                line.close()


def _is_open(line: socket.socket) -> bool:
    try:
        return line.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
