"""Prometheus metrics of the ranking API."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from streams.levels import Level

BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)


class ApiMetrics:
    """Counters of one API process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "specrank_requests", "Requests by outcome", ["variant", "status"], registry=self.registry
        )
        self.candidates = Counter(
            "specrank_candidates", "Candidates by embedding level", ["level"], registry=self.registry
        )
        self.seconds = Histogram(
            "specrank_stage_seconds", "Time by stage of ranking", ["stage"], buckets=BUCKETS_S, registry=self.registry
        )
        self.degraded = Counter("specrank_degraded", "Answers without the store", registry=self.registry)
        self.fm_calls = Gauge(
            "specrank_fm_calls", "FM runs of this process; serving must have none", registry=self.registry
        )
        self.fm_calls.set_function(_fm_calls)
        self.served_dropped = Counter(
            "specrank_served_dropped", "Served records lost for a full buffer", registry=self.registry
        )
        self.pending = Gauge("specrank_pending_requests", "Requests waiting or in work", registry=self.registry)

    def ranked(self, variant: str, timings_ms: dict[str, float], levels: NDArray[np.uint8], degraded: bool) -> None:
        """Counts one answered request."""
        self.requests.labels(variant, "200").inc()
        for stage, value in timings_ms.items():
            self.seconds.labels(stage).observe(value / 1e3)
        counts = np.bincount(levels, minlength=len(Level))
        for level in Level:
            if counts[level]:
                self.candidates.labels(level.label).inc(int(counts[level]))
        if degraded:
            self.degraded.inc()

    def refused(self, status: int) -> None:
        """Counts one request that was not answered."""
        self.requests.labels("", str(status)).inc()

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)


def _fm_calls() -> float:
    # Looked up, not imported: a process that never loads the FM cannot run it, and must not load it for this.
    engine = sys.modules.get("gem.engine")
    return float(sum(engine.CALLS.values())) if engine is not None else 0.0
