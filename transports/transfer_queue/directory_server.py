"""Serves a directory from a thread of the process that began the plane, where TransferQueue's controller cannot.

That is the fallback for a controller whose sampler is not ours: the directory is the same, and so is what it promises.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

from zmq.constants import SocketOption, SocketType
from zmq.error import ContextTerminated
from zmq.sugar.context import Context

from .directory.requests import answer
from .endpoints import Server

__all__ = ["PORT", "DirectoryServer"]

#: Name of its port, as :class:`Server` lists it.
PORT = "directory_socket"


class DirectoryServer:
    """One directory behind a socket of its own.

    Args:
        ip: The address to listen on.

    Attributes:
        server: Where it listens.
    """

    def __init__(self, ip: str) -> None:
        """Listen, and serve from a thread that ends with the process."""
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
        """Answer one request after the other until the context ends."""
        home: dict[str, Any] = {}
        try:
            while True:
                peer, *request = self._socket.recv_multipart()
                self._socket.send_multipart([peer, answer(home, b"".join(request))])
        except ContextTerminated:
            self._socket.close(0)

    def stop(self) -> None:
        """Stop serving; what the directory knew is gone."""
        self._context.term()
        self._thread.join()
