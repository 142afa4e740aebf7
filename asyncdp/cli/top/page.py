"""``asyncdp top --web``: one page without anything from elsewhere, served on loopback."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PAGE", "serve_page"]

#: The page. It asks for state.json every two seconds, and shows it as text only, since names may hold anything.
PAGE: Final = Path(__file__).with_name("page.html")
LOOPBACK: Final = ("127.0.0.1", "::1")
#: The page may run what it holds, and load from its own server alone.
POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def serve_page(address: str, port: int, latest: Callable[[], dict[str, Any]]) -> ThreadingHTTPServer:
    """Serve the page and ``state.json`` in threads; the caller shuts the server down.

    Raises:
        OSError: The port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        """Serves two documents, to pages of this server only."""

        def do_GET(self) -> None:
            """Answer."""
            host = (self.headers.get("Host") or "").rpartition(":")[0].strip("[]")
            if address in LOOPBACK and host not in (*LOOPBACK, "localhost"):
                self.send_error(403, "ask for it by a loopback address")  # a page elsewhere whose name leads here
            elif self.path.split("?")[0] == "/":
                self._send("text/html; charset=utf-8", PAGE.read_text())
            elif self.path.split("?")[0] == "/state.json":
                self._send("application/json", json.dumps(latest(), default=str))
            else:
                self.send_error(404)

        def _send(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the base class
            """Log nothing."""

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="asyncdp top", daemon=True).start()
    return server
