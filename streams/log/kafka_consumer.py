"""One consumer of a group on Kafka: polls, delivers, commits what was handled, backs off."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka import errors as kafka_errors

from streams.log import ActivityLog, Handler, LogUnavailable, Record
from streams.log.delivery import Delivery

SESSION_TIMEOUT_MS = 6_000
"""A consumer not heard of for so long is dead, and others take its partitions: short, since heartbeats have a thread of
their own and no handler delays them; the brokers' usual lower bound."""
HEARTBEAT_MS = 2_000
"""A third of the session: two lost heartbeats kill nobody."""
MAX_POLL_INTERVAL_MS = 600_000
"""A consumer that hangs in its handler for so long loses its partitions to others: above any batch and a usual outage of
the store. After a longer outage it only finds its commit refused, and joins again."""
POLL_MS = 250
"""How long a poll waits for records: it bounds the delay of ``stop`` and the period of ``on_idle``."""
PROBE_PERIOD_S = 2.0
"""A poll without records does not tell whether the broker is there, so it is asked so often."""
PROBE_TIMEOUT_MS = 2_000
"""How long that answer, or connecting, may take; it also bounds how long ``stop`` waits in an outage."""
COMMIT_TIMEOUT_MS = 5_000
"""How long a commit may take: an outage shows after it, and the batch is handled again."""
CLOSE_TIMEOUT_MS = 500
"""How long leaving the group may take; without it the others wait for the end of the session."""
METADATA_AGE_MS = 60_000
"""New partitions are found after at most this."""

_REBALANCED = (
    kafka_errors.CommitFailedError,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.UnknownMemberIdError,
)


def to_record(topic: str, partition: int, offset: int, key: bytes | None, value: bytes | None) -> Record:
    """Make the record of a Kafka message, whoever wrote it."""
    return Record(topic, (key or b"").decode(errors="replace"), value or b"", f"{partition}:{offset}")


def next_offsets(records: Sequence[Record]) -> dict[tuple[str, int], int]:
    """Find what to commit once records are handled.

    Args:
        records: Those of each partition in their order.

    Returns:
        For each (topic, partition) the offset after its last record.
    """
    found = {}
    for record in records:
        partition, _, offset = record.offset.partition(":")
        found[record.topic, int(partition)] = int(offset) + 1
    return found


class Consumer:
    """One run of ``KafkaLog.consume``, which documents the arguments.

    What is not committed is read again after a rebalance or by a new session, so there is no state to keep.
    """

    def __init__(
        self,
        log: ActivityLog,
        options: dict[str, Any],
        *,
        topics: Sequence[str],
        group: str,
        consumer: str,
        handler: Handler,
        max_records: int,
        stop: threading.Event,
        on_idle: Callable[[], None] | None,
        polled: Callable[[], None],
        rejected: Counter[str],
    ) -> None:
        self._topics, self._group, self._stop = list(topics), group, stop
        self._on_idle, self._polled = on_idle, polled
        self._delivery = Delivery(log, group, handler, stop, rejected)
        self._options = options | {
            "group_id": group,
            "client_id": consumer,
            "enable_auto_commit": False,
            "auto_offset_reset": "earliest",
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "heartbeat_interval_ms": HEARTBEAT_MS,
            "max_poll_interval_ms": MAX_POLL_INTERVAL_MS,
            "max_poll_records": max_records,
            "metadata_max_age_ms": METADATA_AGE_MS,
            "bootstrap_timeout_ms": PROBE_TIMEOUT_MS,
            "allow_auto_create_topics": False,
        }

    def run(self) -> None:
        """Consume until stopped, over any number of outages."""
        self._delivery.until_done(self._session)

    def _session(self) -> None:
        try:
            self._consumer = KafkaConsumer(**self._options)
            try:
                self._consumer.subscribe(self._topics)
                self._consume()
            finally:
                self._consumer.close(autocommit=False, timeout_ms=CLOSE_TIMEOUT_MS)
        except kafka_errors.KafkaError as error:
            raise LogUnavailable(f"consuming {', '.join(self._topics)}: {error!r}") from error

    def _consume(self) -> None:
        answered_s = float("-inf")
        while not self._stop.is_set():
            batch = self._poll()
            if batch or time.monotonic() - answered_s > PROBE_PERIOD_S:
                if not batch:
                    self._consumer.end_offsets([TopicPartition(self._topics[0], 0)], timeout_ms=PROBE_TIMEOUT_MS)
                answered_s = time.monotonic()
            self._polled()
            if batch:
                self._delivery.deliver(batch, self._commit)
            elif self._on_idle is not None:
                self._on_idle()

    def _poll(self) -> list[Record]:
        found: dict[Any, Any] = self._consumer.poll(timeout_ms=POLL_MS)
        parts = sorted(found.items(), key=lambda item: (self._topics.index(item[0].topic), item[0].partition))
        return [to_record(m.topic, m.partition, m.offset, m.key, m.value) for _, messages in parts for m in messages]

    def _commit(self, records: Sequence[Record]) -> None:
        offsets = {
            TopicPartition(*place): OffsetAndMetadata(offset, "", -1) for place, offset in next_offsets(records).items()
        }
        try:
            self._consumer.commit(offsets, timeout_ms=COMMIT_TIMEOUT_MS)
        except _REBALANCED:
            # The partitions may be another consumer's by now, who handles these records again. The next poll joins the
            # group anew; a new session here would only cause the next rebalance.
            return
