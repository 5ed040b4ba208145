"""The queue of speculated work: bounded, best first, one job per user."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Compute the rows of one user anew: his slate and his own row, as his log stands when the job runs.

    Attributes:
        user: u64.
        value: expected gain; greater runs first.
    """

    user: int
    value: float


class SpeculationQueue:
    """Jobs by value. A user already waiting is not queued twice: his job runs on his newest log anyway, at the greater value.

    Attributes:
        dropped: jobs lost because the queue was full, lowest value first.
        coalesced: triggers that met a waiting job of their user.
    """

    def __init__(self, max_jobs: int) -> None:
        if max_jobs < 1:
            raise ValueError(f"max_jobs must be at least 1, found {max_jobs}")
        self._max = max_jobs
        self._heap: list[tuple[float, int, int]] = []
        self._waiting: dict[int, tuple[float, int]] = {}
        self._order = itertools.count()
        self.dropped = 0
        self.coalesced = 0

    def __len__(self) -> int:
        """Users that wait."""
        return len(self._waiting)

    def put(self, job: Job) -> None:
        """Queues a job."""
        known = self._waiting.get(job.user)
        if known is not None:
            self.coalesced += 1
            if known[0] >= job.value:
                return
        elif len(self._waiting) >= self._max:
            worst = min(self._waiting, key=lambda user: self._waiting[user])
            self.dropped += 1
            if self._waiting[worst][0] >= job.value:
                return
            del self._waiting[worst]
        if len(self._heap) > 2 * self._max:
            # Entries that were raised or dropped stay behind in the heap; without this they would pile up under overload.
            self._heap = [(-value, -order, user) for user, (value, order) in self._waiting.items()]
            heapq.heapify(self._heap)
        order = next(self._order)
        self._waiting[job.user] = (job.value, -order)
        heapq.heappush(self._heap, (-job.value, order, job.user))

    def pop(self) -> Job | None:
        """The best job, the oldest of equals; None when empty."""
        while self._heap:
            value, order, user = heapq.heappop(self._heap)
            if self._waiting.get(user) == (-value, -order):  # else it was raised or dropped since
                del self._waiting[user]
                return Job(user, -value)
        return None
