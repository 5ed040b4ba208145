"""The activity and served logs behind one small port: publish, and consume at least once.

A handler is given records and must be idempotent, since a record may come again after a failure. Records are committed
after the handler has returned.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

REJECTED_SUFFIX = ".rejected"
"""Records of a topic that no handler could take go to the topic of the same name with this suffix."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a topic.

    Attributes:
        topic: The topic.
        key: What the topic is partitioned by: the user.
        value: The payload.
        offset: The broker's name of its place in the topic.
    """

    topic: str
    key: str
    value: bytes
    offset: str


Handler = Callable[[Sequence[Record]], None]


class Retry(Exception):  # noqa: N818 - it asks for something rather than tell of an error
    """Raised by a handler for a passing outage, such as the store being down: commit nothing, wait, deliver again."""


class LogUnavailable(Retry):
    """The broker cannot be reached. A handler that publishes may let it through: it asks for a retry by itself."""


class ActivityLog(Protocol):
    """What producers and consumers know of a broker."""

    def publish(self, topic: str, key: str, value: bytes) -> None:
        """Append one record.

        Raises:
            LogUnavailable: The broker cannot be reached; publishing again is safe, at the price of a duplicate.
        """

    def publish_many(self, topic: str, records: Sequence[tuple[str, bytes]]) -> None:
        """Append (key, value) records in order.

        Raises:
            LogUnavailable: The broker cannot be reached; some of the records may have been appended.
        """

    def consume(
        self,
        topics: Sequence[str],
        group: str,
        handler: Handler,
        *,
        consumer: str,
        max_records: int = 1000,
        stop: threading.Event,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        """Hand over the records of topics, at least once, until ``stop`` is set.

        Args:
            topics: The topics; in each batch their records come in this order.
            group: The group: each record goes to one of its consumers.
            handler: Takes a batch of records.
            consumer: Name of this consumer, its own in the group. A restarted one first gets what it left unfinished.
            max_records: How many records a batch has at most.
            stop: Ends the call within a second of the handler's return.
            on_idle: Called whenever there was nothing to hand over.
        """

    def published(self, topic: str) -> int:
        """Count the records that were ever published to a topic.

        Raises:
            LogUnavailable: The broker cannot be reached.
        """

    def newest(self, topic: str, num: int) -> list[Record]:
        """Read the newest records of a topic, outside of any group: ``num`` of each of its partitions at most; none if there is no topic.

        Raises:
            LogUnavailable: The broker cannot be reached.
        """

    def lag(self, topic: str, group: str) -> int:
        """Count the records that were published but not yet committed by the group.

        Raises:
            LogUnavailable: The broker cannot be reached.
        """


def reject(log: ActivityLog, record: Record, reason: str) -> None:
    """Put a record that no handler can take aside, with the reason.

    Args:
        log: Where to publish.
        record: The record; it goes to ``<topic>.rejected`` as JSON with the fields topic, key, value, encoding
            (``"utf-8"``, or ``"base64"`` where the bytes are not UTF-8), reason and time_ms.
        reason: What was wrong with it.

    Raises:
        LogUnavailable: The broker cannot be reached.
    """
    try:
        value, encoding = record.value.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        value, encoding = base64.b64encode(record.value).decode("ascii"), "base64"
    message: dict[str, Any] = {
        "topic": record.topic,
        "key": record.key,
        "value": value,
        "encoding": encoding,
        "reason": reason,
        "time_ms": time.time_ns() // 1_000_000,
    }
    log.publish(record.topic + REJECTED_SUFFIX, record.key, msgspec.json.encode(message))
