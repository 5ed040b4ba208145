"""Prometheus metrics of a worker."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from solaris.compute import Done
from solaris.queue import SpeculationQueue


class WorkerMetrics:
    """Counters of one worker process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.handled = Counter("solaris_events", "Events appended to the user log", registry=self.registry)
        self.duplicates = Counter("solaris_duplicate_events", "Events that were known already", registry=self.registry)
        self.rejected = Counter("solaris_rejected", "Records that did not parse", ["topic"], registry=self.registry)
        self.users = Counter("solaris_users_computed", "Users whose rows were computed (f_R)", registry=self.registry)
        self.pairs = Counter("solaris_pairs_computed", "Pairs whose rows were computed (f_C)", registry=self.registry)
        self.seconds = Counter("solaris_compute_seconds", "Time of FM runs and store writes", registry=self.registry)
        self.failed = Counter("solaris_failed", "Users whose rows could not be computed", registry=self.registry)
        self.waiting = Gauge("solaris_queue_jobs", "Users that wait", registry=self.registry)
        self.oldest = Gauge("solaris_queue_oldest_seconds", "Age of the oldest job", registry=self.registry)
        self.dropped = Gauge("solaris_dropped_total", "Jobs lost for a full queue", registry=self.registry)
        self.dropped_value = Gauge("solaris_dropped_value", "Expected gain of those jobs", registry=self.registry)
        self.coalesced = Gauge("solaris_coalesced_total", "Triggers that met a waiting job", registry=self.registry)
        self.skipped = Counter(
            "solaris_skipped", "Jobs that were not run: unchanged or worthless", ["reason"], registry=self.registry
        )
        self.flops = Counter("solaris_flops", "FLOPs of the FM", registry=self.registry)
        self.price = Gauge("solaris_price", "Expected gain that a FLOP must bring", registry=self.registry)

    def events(self, handled: int, new: int) -> None:
        """Counts a batch of events."""
        self.handled.inc(handled)
        self.duplicates.inc(handled - new)

    def put_aside(self, topic: str, number: int) -> None:
        """Counts records that no handler could take."""
        self.rejected.labels(topic).inc(number)

    def queue(self, queue: SpeculationQueue, price: float) -> None:
        """Sets the state of the queue and what a FLOP must bring."""
        self.waiting.set(len(queue))
        self.oldest.set(queue.oldest_s)
        self.dropped.set(queue.dropped)
        self.dropped_value.set(queue.dropped_value)
        self.coalesced.set(queue.coalesced)
        self.price.set(price)

    def ran(self, done: Done, seconds: float) -> None:
        """Counts one FM run."""
        self.users.inc(done.users)
        self.pairs.inc(done.pairs)
        self.flops.inc(done.flops)
        self.skipped.labels("unchanged").inc(done.unchanged)
        self.skipped.labels("worthless").inc(done.worthless)
        self.seconds.inc(seconds)

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)
