"""Prometheus metrics of a worker."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


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
        self.dropped = Gauge("solaris_dropped_total", "Jobs lost for a full queue", registry=self.registry)
        self.coalesced = Gauge("solaris_coalesced_total", "Triggers that met a waiting job", registry=self.registry)

    def events(self, handled: int, new: int) -> None:
        """Counts a batch of events."""
        self.handled.inc(handled)
        self.duplicates.inc(handled - new)

    def queue(self, waiting: int, dropped: int, coalesced: int) -> None:
        """Sets the state of the queue."""
        self.waiting.set(waiting)
        self.dropped.set(dropped)
        self.coalesced.set(coalesced)

    def ran(self, users: int, pairs: int, seconds: float) -> None:
        """Counts one FM run."""
        self.users.inc(users)
        self.pairs.inc(pairs)
        self.seconds.inc(seconds)

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)
