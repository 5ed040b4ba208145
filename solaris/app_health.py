"""Health endpoints of a worker, in a thread of their own: they answer whatever the worker is doing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def health_server(
    port: int, ready: Callable[[], tuple[bool, Mapping[str, object]]], metrics: Callable[[], bytes]
) -> Iterator[int]:
    """Serves /health, /ready and /metrics for the length of the context.

    Args:
        port: 0 takes a free one.
        ready: whether the worker is ready, and what /ready tells about it.
        metrics: text exposition format.

    Yields:
        the port.

    Raises:
        OSError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the base class's name
            """Serves /health, /ready and /metrics."""
            if self.path == "/metrics":
                self._send(200, metrics(), "text/plain; version=0.0.4")
            elif self.path == "/health":
                self._send(200, b'{"status":"ok"}', "application/json")
            elif self.path == "/ready":
                is_ready, detail = ready()
                self._send(200 if is_ready else 503, json.dumps(detail).encode(), "application/json")
            else:
                self._send(404, b'{"detail":"legal paths: /health, /ready, /metrics"}', "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests of a prober are not worth a line."""

    server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
