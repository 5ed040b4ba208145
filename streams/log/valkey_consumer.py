"""One consumer of a group on Valkey Streams: polls, keeps the order between topics, delivers, commits, backs off."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import redis

from streams.log import ActivityLog, Handler, Record, Retry
from streams.log.delivery import CLIENT_OUTAGES as CLIENT_OUTAGES
from streams.log.delivery import Delivery

BLOCK_MS = 250
"""How long a poll waits for records: it bounds the delay of ``stop`` and the period of ``on_idle``."""
CLAIM_IDLE_MS = 60_000
"""A record that its consumer has had for longer belongs to a dead one. Above the slowest batch: claiming a live
consumer's record loses nothing but handles it twice."""
CLAIM_COUNT = 1000
"""Records claimed in one command."""

_NEW = ">"

logger = logging.getLogger(__name__)


def stream_key(topic: str) -> str:
    """Name the stream of a topic; the braces put all topics into one hash slot, since they are read together."""
    return f"{{log}}:{topic}"


class Consumer:
    """One run of ``ValkeyLog.consume``, which documents the arguments.

    Everything read is pending on the server until it is committed, so the state here can be thrown away at any time:
    after an outage, or when records of a dead consumer were claimed, all topics are read from their pending records on.
    """

    def __init__(
        self,
        log: ActivityLog,
        client: redis.Redis,
        *,
        topics: Sequence[str],
        group: str,
        consumer: str,
        handler: Handler,
        max_records: int,
        stop: threading.Event,
        on_idle: Callable[[], None] | None,
        polled: Callable[[], None],
        claim_idle_ms: int,
        rejected: Counter[str],
        trimmed: Counter[str],
    ) -> None:
        self._client = client
        self._topics = {stream_key(topic): topic for topic in topics}
        self._group, self._consumer = group, consumer
        self._delivery = Delivery(log, group, handler, stop, rejected)
        self._on_idle, self._polled = on_idle, polled
        self._stop, self._claim_idle_ms = stop, claim_idle_ms
        self._trimmed = trimmed
        # With several topics a batch holds up to twice of what one poll reads: see _poll.
        self._count = max_records if len(topics) == 1 else max(1, max_records // (2 * len(topics)))
        self._rewind()

    def run(self) -> None:
        """Consume until stopped, over any number of outages."""
        self._delivery.until_done(self._session)

    def _session(self) -> None:
        self._create_groups()
        self._rewind()
        next_claim_s = 0.0
        while not self._stop.is_set():
            if time.monotonic() >= next_claim_s:
                self._claim()
                next_claim_s = time.monotonic() + self._claim_idle_ms / 1000
            idle = all(cursor == _NEW for cursor in self._cursors.values()) and not any(self._held.values())
            batch = self._poll(BLOCK_MS if idle else None)
            self._polled()
            if batch:
                self._delivery.deliver(batch, self._commit)
            elif idle and self._on_idle is not None:
                self._on_idle()

    def _rewind(self) -> None:
        """Forget what was read and not delivered, and read again from the pending records on."""
        self._held: dict[str, list[Record]] = {key: [] for key in self._topics}
        self._cursors = dict.fromkeys(self._topics, "0")

    def _create_groups(self) -> None:
        for key in self._topics:
            try:
                self._client.xgroup_create(key, self._group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):  # it exists
                    raise

    def _claim(self) -> None:
        """Take over the records of dead consumers."""
        for key in self._topics:
            start: Any = "0-0"
            while start is not None:
                reply: Any = self._client.xautoclaim(
                    key, self._group, self._consumer, self._claim_idle_ms, start, count=CLAIM_COUNT
                )
                if reply[1]:
                    self._rewind()
                if len(reply) > 2 and reply[2]:
                    self._count_trimmed(key, len(reply[2]))
                start = reply[0] if reply[0] != b"0-0" else None

    def _poll(self, block_ms: int | None) -> list[Record]:
        """Read all topics, and return what can be delivered in order: topic by topic, none overtaking another topic's.

        A topic of which more is to come is complete only up to its last record. Nothing of any topic goes beyond the
        time that all topics are complete up to; what does is held, and a topic that holds enough is not read on.
        """
        wanted: dict[Any, Any] = {
            key: self._cursors[key] for key, held in self._held.items() if len(held) < self._count
        }
        reply: Any = []
        if wanted:
            try:
                reply = self._client.xreadgroup(self._group, self._consumer, wanted, count=self._count, block=block_ms)
            except redis.ResponseError as error:
                if str(error).startswith("NOGROUP"):  # the server lost its data: a new session makes the groups again
                    raise Retry(str(error)) from error
                raise
        entries = {key.decode(): found for key, found in reply or []}
        complete_ms = []
        for key, held in self._held.items():
            found = entries.get(key, [])
            held += self._records(key, found)
            full = len(found) == self._count
            if self._cursors[key] == _NEW and key in wanted and not full:
                complete_ms.append(float("inf"))
                continue
            complete_ms.append(_time_ms(held[-1]) if held else -1)
            if key in wanted and self._cursors[key] != _NEW:
                self._cursors[key] = found[-1][0].decode() if full else _NEW
        until_ms = min(complete_ms) if len(self._topics) > 1 else float("inf")
        ready = []
        for key, held in self._held.items():
            num_ready = sum(_time_ms(record) <= until_ms for record in held)  # they come first: ids ascend
            ready += held[:num_ready]
            self._held[key] = held[num_ready:]
        return ready

    def _records(self, key: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[Record]:
        topic, records, gone = self._topics[key], [], []
        for entry_id, fields in entries:
            if fields:
                # An entry that somebody else wrote may have no such fields; the handler will refuse it.
                record_key, value = fields.get(b"k", b"").decode(errors="replace"), fields.get(b"v", b"")
                records.append(Record(topic, record_key, value, entry_id.decode()))
            else:
                gone.append(entry_id)
        if gone:
            self._client.xack(key, self._group, *gone)
            self._count_trimmed(key, len(gone))
        return records

    def _count_trimmed(self, key: str, num_records: int) -> None:
        topic = self._topics[key]
        self._trimmed[topic] += num_records
        logger.error(
            "log %s: %d records fell out of the stream before %s handled them", topic, num_records, self._group
        )

    def _commit(self, batch: Sequence[Record]) -> None:
        offsets: dict[str, list[str]] = {}
        for record in batch:
            offsets.setdefault(stream_key(record.topic), []).append(record.offset)
        pipe: Any = self._client.pipeline(transaction=False)
        for key, ids in offsets.items():
            pipe.xack(key, self._group, *ids)
        pipe.execute()


def _time_ms(record: Record) -> int:
    """Time of publishing by the server's clock, the same for all its streams."""
    return int(record.offset.partition("-")[0])
