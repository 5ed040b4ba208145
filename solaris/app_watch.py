"""Watches a consumer from outside: what the broker says of the group's progress decides whether the worker is ready.

A consumer can die while its process, and even its connection, stays up. So nothing here trusts the consumer: a thread asks the
broker for the end of each partition and for what the group has committed, and the store whether it is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import redis
from prometheus_client import CollectorRegistry, Counter, Gauge

from streams.log import LogUnavailable
from streams.log.kafka import KafkaLog
from streams.log.throttle import Throttle

PROBE_PERIOD_S = 5.0
"""How often the broker is asked: a scrape or a readiness check is about as often, and it is six small requests."""
STALL_LIMIT_S = 30.0
"""With records waiting and none committed for so long, a consumer is stalled: above a slow batch, below what a pager should tolerate."""
RESTART_LIMIT_S = 120.0
"""Stalled for so long with nothing in hand, the process ends to be restarted: above any rebalance."""

Place = tuple[str, int]
"""(topic, partition)."""

logger = logging.getLogger(__name__)


class Watch:
    """The state of one worker's consumer, and its metrics.

    Args:
        log: where to ask.
        group: the consumer's group.
        topics: what it consumes.
        registry: of the worker's metrics.
        clock: seconds, monotonic.
        store: asks the store for a sign of life, within a time that it bounds itself; raises a `RedisError` or an `OSError`
            if there is none.
    """

    def __init__(
        self,
        log: KafkaLog,
        group: str,
        topics: Sequence[str],
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
        store: Callable[[], object] = lambda: None,
    ) -> None:
        self._log, self._group, self._topics, self._clock, self._store = log, group, topics, clock, store
        self._assigned: frozenset[Place] | None = None
        self._broker_answers, self._store_answers = False, True
        self._behind = 0
        self._watched: tuple[object, ...] = ()
        self._progress_s = clock()
        self._throttle = Throttle()
        self.records = Counter("solaris_kafka_records", "Records handled and committed", ["topic"], registry=registry)
        self.lag = Gauge(
            "solaris_kafka_lag_records", "Records not yet committed by the group", ["topic"], registry=registry
        )
        self.partitions = Gauge("solaris_kafka_partitions", "Partitions of this worker", registry=registry)
        self.rebalances = Counter("solaris_kafka_rebalances", "Assignments of partitions", registry=registry)
        self.errors = Counter(
            "solaris_kafka_errors",
            "Failures: broker, store, handler, commit, crash, skipped records",
            ["kind"],
            registry=registry,
        )

    def assigned(self, places: Collection[Place]) -> None:
        """Notes the worker's partitions after a rebalance; a spare worker has none."""
        self._assigned = frozenset(places)
        self.partitions.set(len(places))
        self.rebalances.inc()

    @property
    def stalled_s(self) -> float:
        """Seconds for which records have been waiting without any being committed; 0 if none wait."""
        return self._clock() - self._progress_s if self._behind and self._broker_answers else 0.0

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Whether the worker works, and why not."""
        stalled_s = self.stalled_s
        if not self._broker_answers:
            status = "the broker is away"
        elif not self._store_answers:
            status = "the store is away"
        elif self._assigned is None:
            status = "not in the group yet"
        elif stalled_s > STALL_LIMIT_S:
            status = "stalled"
        else:
            status = "ready"
        return status == "ready", {"status": status, "lag": self._behind, "stalled_s": round(stalled_s, 1)}

    def probe(self) -> None:
        """Asks the store and the broker once."""
        try:
            self._store()
            self._store_answers = True
        except (redis.RedisError, OSError):
            # No line: the delivery writes one as soon as a record waits for the store.
            self._store_answers = False
            self.errors.labels("store").inc()
        try:
            found = {topic: self._log.positions(topic, self._group) for topic in self._topics}
        except LogUnavailable as error:
            self._broker_answers = False
            self.errors.labels("broker").inc()
            if self._throttle.ready():
                logger.warning("log %s: the broker is away: %s", self._group, error)
            return
        for topic, partitions in found.items():
            self.lag.labels(topic).set(sum(newest - reached for reached, newest in partitions.values()))
        # A worker answers for its own partitions; one without any for all, since it may have fallen out of the group.
        places = self._assigned or {(topic, partition) for topic in found for partition in found[topic]}
        ends = [found[topic][partition] for topic, partition in sorted(places) if partition in found[topic]]
        watched = (places, [reached for reached, _ in ends])
        behind = sum(newest - reached for reached, newest in ends)
        if watched != self._watched or not behind or not self._broker_answers:
            self._progress_s = self._clock()
        self._watched, self._behind, self._broker_answers = watched, behind, True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Probes in a thread for the length of the context."""
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                self.probe()
                ended.wait(PROBE_PERIOD_S)

        thread = threading.Thread(target=run, name="kafka-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
