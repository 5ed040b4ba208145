"""Publishes served requests off the hot path: a bounded buffer and one thread."""

from __future__ import annotations

import logging
import threading
from collections import deque

from downstream.metrics import ApiMetrics
from streams.log import ActivityLog, LogUnavailable
from streams.requests import SERVED_TOPIC, ServedRequest, encode_served

MAX_BUFFERED = 20_000  # some 100 MB of records of 100 candidates
BATCH = 500
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0

logger = logging.getLogger(__name__)


class ServedPublisher:
    """Takes records without waiting; drops and counts the oldest ones when the log is away for too long."""

    def __init__(self, log: ActivityLog, metrics: ApiMetrics) -> None:
        self._log, self._metrics = log, metrics
        self._buffer: deque[ServedRequest] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="served-publisher", daemon=True)
        self._thread.start()

    def put(self, served: ServedRequest) -> None:
        """Queues one record."""
        with self._lock:
            if len(self._buffer) >= MAX_BUFFERED:
                self._buffer.popleft()
                self._metrics.served_dropped.inc()
            self._buffer.append(served)
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Publishes what is left, as long as the log answers."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            with self._lock:
                batch = [self._buffer[i] for i in range(min(BATCH, len(self._buffer)))]
                if not batch:
                    self._wake.clear()
            if not batch:
                if self._stop.is_set():
                    return
                self._wake.wait()
                continue
            try:
                self._log.publish_many(
                    SERVED_TOPIC, [(f"{served.user:016x}", encode_served(served)) for served in batch]
                )
            except LogUnavailable as error:
                if self._stop.is_set():
                    logger.warning("%d served records are lost, the log is away: %s", len(self._buffer), error)
                    return
                self._stop.wait(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            except Exception:
                # Not an outage: one of them cannot be published, and must not stop the others.
                self._one_by_one(batch)
            backoff_s = FIRST_BACKOFF_S
            with self._lock:
                # A full buffer may have dropped some of these meanwhile; what was published leaves it in any case.
                published = {id(served) for served in batch}
                while self._buffer and id(self._buffer[0]) in published:
                    self._buffer.popleft()

    def _one_by_one(self, batch: list[ServedRequest]) -> None:
        for served in batch:
            try:
                self._log.publish(SERVED_TOPIC, f"{served.user:016x}", encode_served(served))
            except Exception:
                logger.exception("the served record of request %.64s is lost", served.request_id)
                self._metrics.served_dropped.inc()
