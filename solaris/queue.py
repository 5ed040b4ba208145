"""The queue of speculated work: bounded, one job per user, best first, with ageing and fair shares.

Order: ln(value) - ln(1 + the user's recent share of the work) + waiting time / patience. A job e times as valuable overtakes one that has
waited `patience_s` longer, so nobody starves, and a user who triggers without end gets behind those who had nothing yet. Every term but
the common passing of time is fixed when a job is queued, so a heap keeps the order.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from streams.recent import Recent

PATIENCE_S = 60.0
SHARE_HALF_LIFE_S = 600.0  # a user's share of the work is forgotten at this rate
MAX_SHARES = 100_000  # users whose share is remembered
LEAST_VALUE = 1e-12


@dataclass(frozen=True)
class Job:
    """Compute the rows of one user anew: his slate and his own row, as his log stands when the job runs.

    Attributes:
        user: u64.
        value: expected gain; greater runs first.
    """

    user: int
    value: float


@dataclass(frozen=True)
class _Waiting:
    rank: float
    order: int
    value: float
    since: float


class FairShare:
    """Jobs that each user had lately, each halved per half-life.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users = Recent[int, tuple[float, float]](MAX_SHARES)

    def of(self, user: int) -> float:
        """Jobs lately."""
        count, then = self._users.get(user, (0.0, 0.0))
        return count * 0.5 ** ((self._clock() - then) / SHARE_HALF_LIFE_S)

    def add(self, user: int) -> None:
        """One more."""
        self._users[user] = self.of(user) + 1.0, self._clock()


class SpeculationQueue:
    """Jobs by rank. A user already waiting is not queued twice: his job runs on his newest log anyway, at the greater value.

    Args:
        max_jobs: users that wait at most; the last in rank are dropped.
        patience_s: waiting time that is worth a factor of e.
        clock: seconds, monotonic.

    Attributes:
        dropped: jobs lost because the queue was full. dropped_value: what they would have been worth.
        coalesced: triggers that met a waiting job of their user.
    """

    def __init__(
        self, max_jobs: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_jobs < 1:
            raise ValueError(f"max_jobs must be at least 1, found {max_jobs}")
        if patience_s <= 0:
            raise ValueError(f"patience_s must be positive, found {patience_s}")
        self._max, self._patience_s, self._clock = max_jobs, patience_s, clock
        self._best: list[tuple[float, int, int]] = []
        self._worst: list[tuple[float, int, int]] = []
        self._waiting: dict[int, _Waiting] = {}
        self._order = itertools.count()
        self._shares = FairShare(clock)
        self.dropped = 0
        self.dropped_value = 0.0
        self.coalesced = 0

    def __len__(self) -> int:
        """Users that wait."""
        return len(self._waiting)

    @property
    def oldest_s(self) -> float:
        """How long the longest waiting job has waited; 0 when empty."""
        if not self._waiting:
            return 0.0
        return self._clock() - min(job.since for job in self._waiting.values())

    def put(self, job: Job) -> None:
        """Queues a job."""
        known = self._waiting.get(job.user)
        since = self._clock()
        if known is not None:
            self.coalesced += 1
            if known.value >= job.value:
                return
            since = known.since
        rank = math.log(max(job.value, LEAST_VALUE)) - math.log1p(self._shares.of(job.user)) - since / self._patience_s
        if known is None and len(self._waiting) >= self._max and not self._make_room(rank, job):
            return
        entry = _Waiting(rank, next(self._order), job.value, since)
        self._waiting[job.user] = entry
        if max(len(self._best), len(self._worst)) > 2 * self._max:
            # Entries that were raised or dropped stay behind in the heaps; without this they would pile up under overload.
            self._best = [(-job.rank, job.order, user) for user, job in self._waiting.items()]
            self._worst = [(job.rank, -job.order, user) for user, job in self._waiting.items()]
            heapq.heapify(self._best)
            heapq.heapify(self._worst)
        else:
            heapq.heappush(self._best, (-rank, entry.order, job.user))
            heapq.heappush(self._worst, (rank, -entry.order, job.user))

    def pop(self) -> Job | None:
        """The first job, the oldest of equals; None when empty."""
        while self._best:
            _, order, user = heapq.heappop(self._best)
            job = self._waiting.get(user)
            if job is not None and job.order == order:  # else it was raised or dropped since
                del self._waiting[user]
                self._shares.add(user)
                return Job(user, job.value)
        return None

    def _make_room(self, rank: float, job: Job) -> bool:
        """Drops the last in rank, unless that is the new one."""
        self.dropped += 1
        while True:
            worst, order, user = self._worst[0]
            job_there = self._waiting.get(user)
            if job_there is not None and job_there.order == -order:
                break
            heapq.heappop(self._worst)
        if worst >= rank:
            self.dropped_value += job.value
            return False
        heapq.heappop(self._worst)
        self.dropped_value += self._waiting.pop(user).value
        return True
