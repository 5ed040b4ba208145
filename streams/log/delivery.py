"""How records reach a handler, the same through every door: until it is done, and past the record that it cannot take."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import redis

from streams.log import ActivityLog, Handler, Record, Retry, reject
from streams.log.throttle import Throttle

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.05, 5.0
"""Wait after the first failure, doubled up to the last: soon back after a restart, no storm in a long outage."""

CLIENT_OUTAGES = (
    redis.ConnectionError,  # also a server that loads its data, and one that refuses our credentials
    redis.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.TryAgainError,
)
"""What the store's client raises when the server is of no use for now, though the request was right."""
OUTAGES = (Retry, *CLIENT_OUTAGES)
"""What a handler may raise to get its records again: a store's outage counts, even untranslated."""
_PASSING = ("MISCONF ", "NOREPLICAS ", "BUSY ")
"""Answers of a server that will pass, of which the client makes no class of its own."""


def is_outage(error: BaseException) -> bool:
    """Whether the same request may succeed later as it is."""
    if isinstance(error, OUTAGES):
        return True
    return isinstance(error, redis.ResponseError) and any(word in str(error) for word in _PASSING)


logger = logging.getLogger(__name__)


class Delivery:
    """Hands batches to the handler of one consumer.

    Args:
        log: Where records that the handler cannot take are put aside.
        group: The consumer's group, for the log lines.
        handler: Takes a batch of records.
        stop: Ends all waiting.
        rejected: Counts the records of each topic that were put aside.
    """

    def __init__(
        self, log: ActivityLog, group: str, handler: Handler, stop: threading.Event, rejected: Counter[str]
    ) -> None:
        self._log, self._group, self._handler, self._stop, self._rejected = log, group, handler, stop, rejected
        self._outage_throttle, self._reject_throttle = Throttle(), Throttle()

    def deliver(self, batch: Sequence[Record], commit: Callable[[Sequence[Record]], None]) -> bool:
        """Hand over a batch, over any number of outages; record by record if the handler refuses it as a whole.

        Args:
            batch: The records, in their order.
            commit: Called with records that are done with: all at once, or one at a time.

        Returns:
            Whether the whole batch is done with; false if stopped before.
        """
        try:
            handled = self.until_done(lambda: self._handler(batch))
        except Exception:  # some record is not for this handler: find it
            return self._deliver_singly(batch, commit)
        if handled:
            commit(batch)
        return handled

    def _deliver_singly(self, batch: Sequence[Record], commit: Callable[[Sequence[Record]], None]) -> bool:
        for record in batch:
            if not self.until_done(partial(self._handle_or_reject, record)):
                return False
            commit([record])
        return True

    def _handle_or_reject(self, record: Record) -> None:
        try:
            self._handler([record])
        except Exception as error:
            if is_outage(error):
                raise
            reject(self._log, record, f"{type(error).__name__}: {error}")
            self._rejected[record.topic] += 1
            if self._reject_throttle.ready():
                total = self._rejected[record.topic]
                logger.warning("log %s: record %s rejected, no. %d", record.topic, record.offset, total, exc_info=error)

    def until_done(self, action: Callable[[], None]) -> bool:
        """Do something over any number of outages; false if stopped before it was done."""
        wait_s = BACKOFF_FIRST_S
        while not self._stop.is_set():
            started_s = time.monotonic()
            try:
                action()
                return True
            except Exception as error:
                if not is_outage(error):
                    raise
                if self._outage_throttle.ready():
                    logger.warning("log %s: outage, trying again: %s: %s", self._group, type(error).__name__, error)
            if time.monotonic() - started_s > BACKOFF_LAST_S:
                wait_s = BACKOFF_FIRST_S  # it went well for a while
            self._stop.wait(wait_s * random.uniform(0.5, 1))
            wait_s = min(2 * wait_s, BACKOFF_LAST_S)
        return False
