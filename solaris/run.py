"""Runs one Solaris worker process, with its health endpoints."""

from __future__ import annotations

import json
import logging
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import redis
import torch

from loopfm.represent import Representer
from solaris.settings import WorkerSettings
from solaris.worker import Worker, WorkerConfig
from streams.log.valkey import ValkeyLog

logger = logging.getLogger(__name__)


def run_worker(settings: WorkerSettings) -> None:
    """Works until SIGTERM or SIGINT.

    Raises:
        streams.artifact.ArtifactError: a model is missing or damaged.
        OSError: the health port is taken.
    """
    torch.set_num_threads(1)
    representer = Representer.load(settings.gem, settings.autoencoder)
    client = redis.Redis.from_url(settings.redis_url)
    log = ValkeyLog(client)
    config = WorkerConfig(slate_size=settings.slate_size, flops_per_s=settings.flops_per_s)
    worker = Worker(client, log, representer, config)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = _health_server(settings.health_port, worker, log) if settings.health_port is not None else None
    logger.info("worker %s serves FM version %016x", settings.consumer, representer.version)
    try:
        worker.run(settings.consumer, stop)
    finally:
        if server is not None:
            server.shutdown()


def _health_server(port: int, worker: Worker, log: ValkeyLog) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the base class's name
            """Serves /health, /ready and /metrics."""
            if self.path == "/metrics":
                self._send(200, worker.metrics.render(), "text/plain; version=0.0.4")
            elif self.path == "/health":
                self._send(200, b'{"status":"ok"}', "application/json")
            elif self.path == "/ready":
                body = json.dumps(
                    {"status": "ready" if log.healthy else "stalled", "poll_age_s": min(log.poll_age_s, 1e9)}
                )
                self._send(200 if log.healthy else 503, body.encode(), "application/json")
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
    return server
