"""The log on Valkey Streams with consumer groups: the door of the embedded mode.

A topic is one stream; the consumers of a group share it record by record, so that two of them may handle records of one
user at the same time. Handlers that merge (the user log, the store) do not mind.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry as ClientRetry

from streams.log import Handler, LogUnavailable, Record
from streams.log.valkey_consumer import CLAIM_IDLE_MS, CLIENT_OUTAGES, Consumer, stream_key

MAX_RECORDS = 1_000_000
"""A stream keeps about its newest million records (some 300 MB of events), read or not: alarm on ``lag`` well below."""
PUBLISH_CHUNK = 10_000
"""Records in one round trip of ``publish_many``."""
IO_TIMEOUT_S = 5.0
"""How long an answer may take, blocking reads of .25 s included; a connection that died silently shows after it."""
CONNECT_TIMEOUT_S = 1.0
"""How long connecting may take; it also bounds how long ``stop`` waits while the server's host is unreachable."""
POLL_AGE_LIMIT_S = 30.0
"""A consumer that has not polled for so long is stalled: above a slow batch, below what a pager should tolerate."""

_POOL_STATE = ("maint_", "orig_", "himport_")


class ValkeyLog:
    """An ``ActivityLog`` on a Valkey or Redis server.

    Args:
        client: A client of the server. Only its address and credentials are used: the log opens connections of its own,
            which do not retry by themselves, since the log has its own backoff.
        max_records: About how many records a stream keeps.
        claim_idle_ms: How long a record may be with a consumer before another one of the group takes it over.

    Attributes:
        rejected: How many records of each topic were put aside.
        trimmed: How many records of each topic were dropped by the stream's bound while a consumer had them.
    """

    def __init__(
        self, client: redis.Redis, *, max_records: int = MAX_RECORDS, claim_idle_ms: int = CLAIM_IDLE_MS
    ) -> None:
        self._client = _own_client(client)
        self._max_records = max_records
        self._claim_idle_ms = claim_idle_ms
        self._polled_s: dict[tuple[str, str], float] = {}
        self.rejected: Counter[str] = Counter()
        self.trimmed: Counter[str] = Counter()

    @property
    def poll_age_s(self) -> float:
        """Seconds since the last successful poll of the slowest consumer here; infinite before one, or with none."""
        now_s = time.monotonic()
        return max((now_s - polled_s for polled_s in list(self._polled_s.values())), default=float("inf"))

    @property
    def healthy(self) -> bool:
        """Whether every consumer here has polled within ``POLL_AGE_LIMIT_S``; false without any consumer."""
        return self.poll_age_s <= POLL_AGE_LIMIT_S

    def publish(self, topic: str, key: str, value: bytes) -> None:
        """Append one record; see ``ActivityLog.publish``."""
        self.publish_many(topic, [(key, value)])

    def publish_many(self, topic: str, records: Sequence[tuple[str, bytes]]) -> None:
        """Append (key, value) records in order, oldest records falling out; see ``ActivityLog.publish_many``."""
        bound = ("MAXLEN", "~", self._max_records)
        with _log_unavailable(f"publish to {topic}"):
            for start in range(0, len(records), PUBLISH_CHUNK):
                pipe: Any = self._client.pipeline(transaction=False)
                for key, value in records[start : start + PUBLISH_CHUNK]:
                    pipe.execute_command("XADD", stream_key(topic), *bound, "*", "k", key, "v", value)
                pipe.execute()

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
        """Hand over the records of topics, at least once, until ``stop`` is set; see ``ActivityLog.consume``.

        All topics are read together: of two records of different topics that come to this consumer, the one published
        earlier is in the same or an earlier batch (records of one millisecond count as simultaneous; records that were
        unfinished when a consumer died come late). A new group starts at the oldest record. A ``Retry``, or an outage
        of the server or of the handler's store, is waited out with bounded backoff. If a handler raises anything else,
        its batch is handed over again record by record, and the record that raises is put aside by ``reject``.

        Raises:
            ValueError: No topics, one given twice, or ``max_records`` below one for each topic.
        """
        if not topics or len(set(topics)) != len(topics):
            raise ValueError(f"topics are {list(topics)}, expected one or more different ones")
        if max_records < len(topics):
            raise ValueError(f"max_records is {max_records}, expected at least 1 for each of {len(topics)} topics")
        name = (group, consumer)
        self._polled_s[name] = float("-inf")

        def polled() -> None:
            self._polled_s[name] = time.monotonic()

        running = Consumer(
            self,
            self._client,
            topics=topics,
            group=group,
            consumer=consumer,
            handler=handler,
            max_records=max_records,
            stop=stop,
            on_idle=on_idle,
            polled=polled,
            claim_idle_ms=self._claim_idle_ms,
            rejected=self.rejected,
            trimmed=self.trimmed,
        )
        try:
            running.run()
        finally:
            self._polled_s.pop(name, None)

    def published(self, topic: str) -> int:
        """Count the records ever published to a topic; see ``ActivityLog.published``."""
        key = stream_key(topic)
        with _log_unavailable(f"length of {topic}"):
            if not self._client.exists(key):
                return 0
            info: Any = self._client.xinfo_stream(key)
        return int(info["entries-added"])

    def newest(self, topic: str, num: int) -> list[Record]:
        """Read the newest records of a topic, oldest first; see ``ActivityLog.newest``."""
        with _log_unavailable(f"newest of {topic}"):
            entries: Any = self._client.xrevrange(stream_key(topic), count=num)
        return [
            Record(topic, fields[b"k"].decode(), fields[b"v"], number.decode()) for number, fields in reversed(entries)
        ]

    def lag(self, topic: str, group: str) -> int:
        """Count the records not yet committed by the group; see ``ActivityLog.lag``.

        The stream's length, an upper bound, stands in where the server has lost count of the records not yet read.
        """
        key = stream_key(topic)
        with _log_unavailable(f"lag of {topic}"):
            length: Any = self._client.xlen(key)
            groups: Any = self._client.xinfo_groups(key) if self._client.exists(key) else []
        for info in groups:
            if info["name"] == group.encode():
                unread = length if info["lag"] is None else info["lag"]
                return int(unread) + int(info["pending"])
        return int(length)


@contextmanager
def _log_unavailable(action: str) -> Iterator[None]:
    try:
        yield
    except CLIENT_OUTAGES as error:
        raise LogUnavailable(f"{action}: {error}") from error


def _own_client(client: redis.Redis) -> redis.Redis:
    """Make a client of the same server, with the same settings but for its timeouts, retries and replies."""
    settings = {
        name: value for name, value in client.get_connection_kwargs().items() if not name.startswith(_POOL_STATE)
    }
    settings |= {
        "socket_timeout": IO_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": ClientRetry(NoBackoff(), 0),
        "retry_on_error": [],
        "decode_responses": False,
        "protocol": 2,  # one shape of replies, whatever the caller's client prefers
    }
    pool = redis.ConnectionPool(connection_class=client.connection_pool.connection_class, **settings)
    return redis.Redis(connection_pool=pool)
