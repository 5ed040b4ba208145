"""A store client for the hot path: short timeouts, and after a failure the store is left alone for a moment.

Without the pause each request of an outage would wait for its own timeout, and a store that is down would slow every answer.
"""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from downstream.settings import ApiSettings


class _Guard:
    """Laid over a connection class: refuses to connect while the pause after the last failure lasts."""

    retry_s = 0.5
    _closed_until = 0.0  # shared by all connections of the process

    def connect(self, *args: Any, **kwargs: Any) -> None:
        """Connects, unless that failed a moment ago."""
        if time.monotonic() < _Guard._closed_until:
            raise redis.ConnectionError("the store failed a moment ago and is left alone")
        try:
            super().connect(*args, **kwargs)  # type: ignore[misc]
        except (redis.RedisError, OSError):
            _Guard._closed_until = time.monotonic() + self.retry_s
            raise

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """Reads a reply; a time-out closes the guard too."""
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except (redis.TimeoutError, redis.ConnectionError):
            _Guard._closed_until = time.monotonic() + self.retry_s
            raise


def guarded_client(settings: ApiSettings) -> redis.Redis:
    """The client of one API process."""
    _Guard.retry_s = settings.store_retry_s
    # The address decides the kind of connection: rediss:// is encrypted, unix:// is a socket.
    kind = parse_url(settings.redis_url).get("connection_class", redis.Connection)
    pool = redis.ConnectionPool.from_url(
        settings.redis_url,
        connection_class=type("GuardedConnection", (_Guard, kind), {}),
        socket_timeout=settings.store_timeout_s,
        socket_connect_timeout=settings.store_timeout_s,
        retry=Retry(NoBackoff(), 0),
        max_connections=8,
    )
    return redis.Redis(connection_pool=pool)
