"""Runs the ranking API process."""

from __future__ import annotations

import errno
import socket

import uvicorn

from downstream.api import create_app
from downstream.settings import ApiSettings
from streams.errors import UserError
from streams.log.address import open_log


class PortBusyError(UserError, RuntimeError):
    """The port is taken by another process."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        PortBusyError: naming the port.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PortBusyError(
                f"port {port} on {host} cannot be used: {error.strerror}; choose another with --port"
            ) from error
        raise
    return sock


def serve(settings: ApiSettings) -> None:
    """Serves until a signal.

    Raises:
        PortBusyError: the port is taken.
        streams.artifact.ArtifactError: a ranker is missing or damaged.
    """
    sock = bind(settings.host, settings.port)
    log = open_log(settings.log_url or settings.redis_url)
    app = create_app(settings, log)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[sock])
