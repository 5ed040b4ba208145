"""The log on Apache Kafka: keyed, idempotent publishing, topics as stated, and consuming in a group.

A record's key, the user, decides its partition, and a partition has one consumer of a group at a time: records of one
user are handled in their order and never by two at once. There is no order between topics.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetSpec, TopicPartition
from kafka import errors as kafka_errors

from streams.errors import UserError
from streams.log import Handler, LogUnavailable, Record
from streams.log.kafka_client import MAX_REJECTED_BYTES, KafkaSecurity, TopicSpec, servers
from streams.log.kafka_consumer import Consumer, to_record

PUBLISH_CHUNK = 10_000
"""Records that wait for their acknowledgement together; it bounds the producer's memory."""
PUBLISH_TIMEOUT_S = 10.0
"""How long a chunk may take to be acknowledged, tries of the producer included; a leader's election is seconds."""
REQUEST_TIMEOUT_S = 5.0
"""How long one answer of a broker may take; twice in ``PUBLISH_TIMEOUT_S``."""
CONNECT_TIMEOUT_S = 3.0
"""How long the first answer of any broker may take, TLS and authentication included."""
ADMIN_TIMEOUT_S = 5.0
"""How long to try for an answer about topics, offsets and groups: a group's first coordinator takes a second."""
ADMIN_WAIT_S = 0.1
"""Wait between those tries."""
READ_TIMEOUT_S = 20.0
"""How long ``read`` may take: it is for some thousand records at most, which take a second."""
READ_POLL_MS = 250
"""How long one poll of it waits."""
LINGER_MS = 5
"""How long records of ``publish_many`` wait for others of their partition; a flush ends it, so that one alone does not."""
BATCH_BYTES = 65_536
"""Bytes of a partition that are sent together."""
POLL_AGE_LIMIT_S = 30.0
"""A consumer that has not polled for so long is stalled: above a slow batch, below what a pager should tolerate."""

_TOPIC_EXISTS = kafka_errors.TopicAlreadyExistsError.errno
_TOPIC_UNKNOWN = kafka_errors.UnknownTopicOrPartitionError.errno
_NOT_OURS = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.InvalidTopicError,
)
"""Errors of the caller: trying again would not help."""

_T = TypeVar("_T")


class TopicMismatchError(UserError, ValueError):
    """A topic exists with another number of partitions; the message names both."""


class KafkaLog:
    """An ``ActivityLog`` on a Kafka cluster. Clients connect when they are first needed; threads may share it.

    Args:
        bootstrap_servers: Addresses ``host:port`` of some brokers, as a list or with commas.
        security: How to prove who we are.

    Attributes:
        rejected: How many records of each topic were put aside by ``consume``.

    Raises:
        ValueError: There is no address.
    """

    def __init__(self, bootstrap_servers: str | Sequence[str], security: KafkaSecurity | None = None) -> None:
        self._options: dict[str, Any] = {"bootstrap_servers": servers(bootstrap_servers)}
        self._options |= (security or KafkaSecurity()).options()
        self._lock = threading.Lock()
        self._admin_lock = threading.Lock()
        self._producer: Any = None
        self._admin: Any = None
        self._polled_s: dict[object, float] = {}
        self.rejected: Counter[str] = Counter()

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
        """Append one record; see ``ActivityLog.publish``, and ``publish_many`` for a further error."""
        self.publish_many(topic, [(key, value)])

    def publish_many(self, topic: str, records: Sequence[tuple[str, bytes]]) -> None:
        """Append (key, value) records, those of a key in order; returns once all replicas in sync have them.

        Raises:
            LogUnavailable: The cluster cannot be reached or does not know the topic; some of the records may have been
                appended. It is raised within ``PUBLISH_TIMEOUT_S`` for each ``PUBLISH_CHUNK`` records.
            ValueError: A record is too large, or the topic's name not legal.
        """
        for start in range(0, len(records), PUBLISH_CHUNK):
            producer = self._connected_producer(topic)
            try:
                sent = [
                    producer.send(topic, key=key.encode(), value=value)
                    for key, value in records[start : start + PUBLISH_CHUNK]
                ]
                producer.flush(PUBLISH_TIMEOUT_S)
                for future in sent:
                    future.get(0)
            except _NOT_OURS as error:
                raise ValueError(f"publish to {topic}: {error}") from error
            except kafka_errors.KafkaError as error:
                # What it still holds might be appended after a later try of ours, and so undo the order.
                self._discard_producer(producer)
                raise LogUnavailable(f"publish to {topic}: {error!r}") from error

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

        A new group starts at the oldest record. In a batch the records of a topic, and within it those of a partition,
        are together. Records of different topics may overtake each other from one batch to the next. What a consumer
        left unfinished goes to whoever gets its partitions, when its session has timed out. ``consumer`` is the name in
        the broker's log only: two consumers may share it. A ``Retry``, or an outage of the cluster or of the handler's
        store, is waited out with bounded backoff; with the cluster away, ``stop`` may take two seconds. If a handler
        raises anything else, its batch is handed over again record by record, and the record that raises is put aside
        by ``reject``.

        Raises:
            ValueError: No topics, one given twice, or ``max_records`` below one.
        """
        if not topics or len(set(topics)) != len(topics):
            raise ValueError(f"topics are {list(topics)}, expected one or more different ones")
        if max_records < 1:
            raise ValueError(f"max_records is {max_records}, expected 1 or more")
        name = object()
        self._polled_s[name] = float("-inf")

        def polled() -> None:
            self._polled_s[name] = time.monotonic()

        running = Consumer(
            self,
            self._options,
            topics=topics,
            group=group,
            consumer=consumer,
            handler=handler,
            max_records=max_records,
            stop=stop,
            on_idle=on_idle,
            polled=polled,
            rejected=self.rejected,
        )
        try:
            running.run()
        finally:
            self._polled_s.pop(name, None)

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Make the topics that do not exist yet; those that do keep their settings.

        Args:
            specs: The topics, such as ``kafka_client.topic_specs()``.

        Raises:
            LogUnavailable: The cluster cannot be reached.
            TopicMismatchError: A topic exists with another number of partitions: its users would change partitions.
        """
        wanted = {
            spec.name: {"num_partitions": spec.partitions, "replication_factor": -1, "configs": spec.config()}
            for spec in specs
        }

        def create(admin: Any) -> dict[str, int]:
            for topic in admin.create_topics(wanted, raise_errors=False)["topics"]:
                if topic["error_code"] not in (0, _TOPIC_EXISTS):
                    raise kafka_errors.for_code(topic["error_code"])(f"{topic['name']}: {topic['error_message']}")
            found = _partitions(admin, list(wanted))
            if len(found) < len(wanted):  # a broker may learn of a topic after the controller has made it
                raise kafka_errors.LeaderNotAvailableError(", ".join(set(wanted) - set(found)))
            return {name: len(partitions) for name, partitions in found.items()}

        found = self._ask("create topics", create)
        for spec in specs:
            if found[spec.name] != spec.partitions:
                raise TopicMismatchError(
                    f"topic {spec.name} has {found[spec.name]} partitions, expected {spec.partitions}"
                )

    def published(self, topic: str) -> int:
        """Count the records ever published to a topic, 0 if it does not exist; see ``ActivityLog.published``."""

        def count(admin: Any) -> int:
            return sum(_offsets(admin, _places(admin, topic), OffsetSpec.LATEST).values())

        return self._ask(f"length of {topic}", count)

    def lag(self, topic: str, group: str) -> int:
        """Count the records not yet committed by the group; see ``ActivityLog.lag``.

        Records that the topic no longer keeps are not counted.
        """
        return sum(newest - reached for reached, newest in self.positions(topic, group).values())

    def positions(self, topic: str, group: str) -> dict[int, tuple[int, int]]:
        """Find how far a group is in each partition of a topic.

        Returns:
            For each partition the offset up to which its records are committed or no longer kept, and the offset after
            its newest record; empty if the topic does not exist.

        Raises:
            LogUnavailable: The cluster cannot be reached.
        """

        def find(admin: Any) -> dict[int, tuple[int, int]]:
            places = _places(admin, topic)
            if not places:
                return {}
            committed = admin.list_group_offsets({group: places})[group]
            oldest = _offsets(admin, places, OffsetSpec.EARLIEST)
            newest = _offsets(admin, places, OffsetSpec.LATEST)
            found = {}
            for place in places:
                reached = max(committed[place].offset if place in committed else -1, oldest[place])
                found[place.partition] = (min(reached, newest[place]), newest[place])
            return found

        return self._ask(f"lag of {topic}", find)

    def read(self, topic: str, partition: int, start: int, stop: int) -> list[Record]:
        """Read the records of a partition from one offset up to another one that a record has, outside of any group.

        Returns:
            Those with offsets in [start, stop). Not every offset has a record: some were dropped, some end a transaction.

        Raises:
            LogUnavailable: The cluster cannot be reached, or does not give them within ``READ_TIMEOUT_S``.
        """
        return [record for at, record in self._read(topic, partition, start, stop) if at < stop]

    def newest(self, topic: str, num: int) -> list[Record]:
        """Read the newest records of a topic; see ``ActivityLog.newest``. They come by partition."""

        def find(admin: Any) -> list[tuple[int, int, int]]:
            places = _places(admin, topic)
            oldest, end = (_offsets(admin, places, spec) for spec in (OffsetSpec.EARLIEST, OffsetSpec.LATEST))
            return [(place.partition, max(oldest[place], end[place] - num), end[place]) for place in places]

        ends = self._ask(f"newest of {topic}", find)
        return [
            record
            for partition, start, end in ends
            if end > start
            for _, record in self._read(topic, partition, start, end - 1)
        ]

    def _read(self, topic: str, partition: int, start: int, last: int) -> list[tuple[int, Record]]:
        """(offset, record) from one offset up to and with another one that a record has."""
        deadline_s, place = time.monotonic() + READ_TIMEOUT_S, TopicPartition(topic, partition)
        found: list[tuple[int, Record]] = []
        try:
            with contextlib.closing(
                KafkaConsumer(
                    **self._options,
                    auto_offset_reset="earliest",
                    enable_auto_commit=False,
                    allow_auto_create_topics=False,
                    bootstrap_timeout_ms=int(CONNECT_TIMEOUT_S * 1000),
                    request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
                )
            ) as consumer:
                consumer.assign([place])
                consumer.seek(place, start)
                while time.monotonic() < deadline_s:
                    for message in consumer.poll(timeout_ms=READ_POLL_MS).get(place, ()):
                        record = to_record(topic, partition, message.offset, message.key, message.value)
                        found.append((message.offset, record))
                        if message.offset >= last:
                            return found
                raise LogUnavailable(f"read {topic}: nothing at offset {last} of partition {partition}")
        except kafka_errors.KafkaError as error:
            raise LogUnavailable(f"read {topic}: {error!r}") from error

    def close(self) -> None:
        """Close the producer and the admin client; what is used afterwards connects again."""
        self._discard_producer(self._producer)
        with self._admin_lock:
            self._discard_admin()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _connected_producer(self, topic: str) -> Any:
        with self._lock:
            if self._producer is None:
                try:
                    self._producer = KafkaProducer(
                        **self._options,
                        enable_idempotence=True,
                        acks="all",
                        linger_ms=LINGER_MS,
                        batch_size=BATCH_BYTES,
                        max_request_size=MAX_REJECTED_BYTES,
                        allow_auto_create_topics=False,
                        max_block_ms=int(CONNECT_TIMEOUT_S * 1000),
                        bootstrap_timeout_ms=int(CONNECT_TIMEOUT_S * 1000),
                        request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
                        delivery_timeout_ms=int(PUBLISH_TIMEOUT_S * 1000),
                    )
                except kafka_errors.KafkaError as error:
                    raise LogUnavailable(f"publish to {topic}: {error!r}") from error
            return self._producer

    def _discard_producer(self, producer: Any) -> None:
        with self._lock:
            if self._producer is producer:
                self._producer = None
        if producer is not None:
            with contextlib.suppress(kafka_errors.KafkaError):
                producer.close(timeout=0)

    def _ask(self, action: str, question: Callable[[Any], _T]) -> _T:
        """Ask the cluster something, again until an answer or ``ADMIN_TIMEOUT_S``."""
        deadline_s = time.monotonic() + ADMIN_TIMEOUT_S
        with self._admin_lock:
            while True:
                try:
                    if self._admin is None:
                        self._admin = KafkaAdminClient(
                            **self._options,
                            bootstrap_timeout_ms=int(CONNECT_TIMEOUT_S * 1000),
                            request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
                        )
                    return question(self._admin)
                except kafka_errors.KafkaError as error:
                    self._discard_admin()
                    if not error.retriable or time.monotonic() > deadline_s:
                        raise LogUnavailable(f"{action}: {error!r}") from error
                time.sleep(ADMIN_WAIT_S)

    def _discard_admin(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()


def _partitions(admin: Any, topics: Sequence[str]) -> dict[str, list[int]]:
    """Find the partitions of those topics that exist."""
    found = {}
    for topic in admin.describe_topics(list(topics)):
        if topic["error_code"] == _TOPIC_UNKNOWN:
            continue
        if topic["error_code"] or any(partition["error_code"] for partition in topic["partitions"]):
            raise kafka_errors.LeaderNotAvailableError(topic["name"])  # for now: it is asked again
        found[topic["name"]] = [partition["partition_index"] for partition in topic["partitions"]]
    return found


def _places(admin: Any, topic: str) -> list[Any]:
    return [TopicPartition(topic, partition) for partition in _partitions(admin, [topic]).get(topic, [])]


def _offsets(admin: Any, places: Sequence[Any], spec: Any) -> dict[Any, int]:
    if not places:
        return {}
    found = admin.list_partition_offsets(dict.fromkeys(places, spec))
    return {place: int(offset.offset) for place, offset in found.items()}
