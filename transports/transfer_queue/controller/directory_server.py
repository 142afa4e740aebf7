"""Serves a directory from a thread of the process that bootstrapped the plane.

This is the fallback for a controller that cannot run our sampler. The directory and its guarantees are the same.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

from zmq.constants import SocketOption, SocketType
from zmq.error import ContextTerminated
from zmq.sugar.context import Context

from ..directory.requests import answer
from ..endpoints import Server

__all__ = ["PORT", "DirectoryServer"]

#: Name of the server's port in :class:`Server`.
PORT = "directory_socket"


class DirectoryServer:
    """Serves one directory on its own socket.

    Args:
        ip: IP address to listen on.

    Attributes:
        server: Address of the socket.
    """

    def __init__(self, ip: str) -> None:
        """Listen, and serve from a daemon thread."""
        self._context: Any = Context()
        self._socket: Any = self._context.socket(SocketType.ROUTER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        host = ip
        if ":" in ip:
            self._socket.setsockopt(SocketOption.IPV6, 1)
            host = f"[{ip}]"
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.server = Server(f"asyncdp_directory_{uuid.uuid4().hex[:8]}", ip, {PORT: port})
        self._thread = threading.Thread(target=self._serve, name="asyncdp-directory", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Answer requests one after another until the ZMQ context is terminated."""
        home: dict[str, Any] = {}
        try:
            while True:
                peer, *request = self._socket.recv_multipart()
                self._socket.send_multipart([peer, answer(home, b"".join(request))])
        except ContextTerminated:
            self._socket.close(0)

    def stop(self) -> None:
        """Stop serving; the state of the directory is lost."""
        self._context.term()
        self._thread.join()
