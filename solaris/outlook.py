"""What the served log teaches about the near future, online: returns of users, persistence of candidates, gain of a fresh row.

The value of a pair = E[requests of the user within the TTL] x P(the pair is asked for | return) x gain of having it. Each factor is a
table of decayed means, shrunk towards a stated prior: calibrated by construction, cheap to update, and bounded in memory. What a worker
learns is a preference, never state that anybody is promised: a restarted worker begins at the priors and learns again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streams.levels import Level
from streams.recent import Recent

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
MAX_USERS = 100_000  # whose visits are remembered: about 40 MB
MAX_PENDING = 100_000  # visits whose TTL has not passed yet; beyond it new ones teach nothing
MEMORY = 20_000.0  # outcomes after which a cell begins to forget

VISIT_COUNTS = (1.5, 2.5, 4.5, 8.5, 16.5)  # requests lately, each halved per day
VISIT_GAPS_MS = (10 * 60_000, HOUR_MS, 6 * HOUR_MS, DAY_MS)  # since the request before
RETURN_STRENGTH = 20.0
SIMILAR_RANK, RISING_RANK = 10_000, 10_001  # no places in an answer: ads that the explorer added
RANKS = (5, 10, 25, 50, 100, 200, SIMILAR_RANK, RISING_RANK)
PERSISTENCE_PRIOR, EXPLORED_PRIOR, PERSISTENCE_STRENGTH = 0.3, 0.02, 50.0
RISING, FALLING = 1.5, 0.67  # asks for an ad within the last hours against its longer past
NUM_TRENDS = 3
FAST_MS, SLOW_MS = 2 * HOUR_MS, 12 * HOUR_MS
TREND_SLOTS = 2**16

GAIN_PRIOR = {
    Level.NONE: 0.10,
    Level.USER: 0.08,
    Level.USER_AGGREGATE: 0.05,
    Level.PAIR_STALE: 0.02,
    Level.PAIR_FRESH: 0.01,
}
"""Mean squared move of the ranker's logit once a fresh row is there. Guesses that order the levels, until some outcomes are known."""
GAIN_STRENGTH = 500.0
LEAST_GAIN, MAX_MOVE = 1e-3, 4.0


@dataclass(frozen=True)
class Slate:
    """The ads that a user's last requests asked for, n of them: what a job computes pairs of.

    Attributes:
        ads: u8[n].
        ranks: i8[n]; place in the answer, best = 0.
        logits: f8[n]; of the score in it.
        levels: i8[n]; `streams.levels.Level` that was read for it.
        surface: index of the newest request's.
        time_ms: moment of the newest request.
    """

    ads: NDArray[np.uint64]
    ranks: NDArray[np.int64]
    logits: NDArray[np.float64]
    levels: NDArray[np.int64]
    surface: int
    time_ms: int

    @property
    def explored(self) -> NDArray[np.bool_]:
        """Which of them the explorer added; bool[n]."""
        return self.ranks >= SIMILAR_RANK

    @staticmethod
    def concatenate(slates: Sequence[Slate]) -> Slate:
        """The candidates of several users, one after the other; surface and moment are the first's."""
        columns = zip(*((slate.ads, slate.ranks, slate.logits, slate.levels) for slate in slates), strict=True)
        ads, ranks, logits, levels = (np.concatenate(column) for column in columns)
        return Slate(ads, ranks, logits, levels, slates[0].surface, slates[0].time_ms)


class RateTable:
    """Decayed means of an outcome per cell.

    Args:
        cells: how many.
        strength: outcomes that the prior is worth.
    """

    def __init__(self, cells: int, strength: float) -> None:
        self._trials, self._sums, self._strength = np.zeros(cells), np.zeros(cells), strength

    def add(self, cells: NDArray[np.int64], outcomes: NDArray[np.float64]) -> None:
        """Learns outcomes f8[n] of cells i8[n]."""
        self._trials += np.bincount(cells, minlength=len(self._trials))
        self._sums += np.bincount(cells, outcomes, minlength=len(self._sums))
        full = self._trials > MEMORY
        if full.any():
            self._trials[full] /= 2
            self._sums[full] /= 2

    def mean(self, cells: NDArray[np.int64] | int, prior: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Expected outcome of each cell, f8[n]."""
        found: NDArray[np.float64] = (self._sums[cells] + self._strength * prior) / (
            self._trials[cells] + self._strength
        )
        return found


@dataclass
class _Visit:
    time_ms: int
    cell: int
    returns: int = 0


@dataclass
class _Visitor:
    last_ms: int
    count: float = 1.0
    cell: int = 0
    open: list[_Visit] = field(default_factory=list)


class Returns:
    """How often a user will come back within the TTL, by how often and how lately he came.

    Args:
        ttl_ms: of the rows.
    """

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._gaps = len(VISIT_GAPS_MS) + 2
        self._table = RateTable((len(VISIT_COUNTS) + 1) * self._gaps, RETURN_STRENGTH)
        self._users = Recent[int, _Visitor](MAX_USERS)
        self._pending: deque[_Visit] = deque()
        self._clock_ms = 0

    def observe(self, user: int, time_ms: int) -> None:
        """A request of a user; one that is not newer than what is known of him teaches nothing."""
        visitor = self._users.get(user)
        if visitor is not None and time_ms <= visitor.last_ms:
            return
        gap = self._gaps - 1
        if visitor is None:
            visitor = _Visitor(time_ms)
        else:
            since = time_ms - visitor.last_ms
            gap = int(np.searchsorted(VISIT_GAPS_MS, since))
            visitor.count = visitor.count * 0.5 ** (since / DAY_MS) + 1
            visitor.last_ms = time_ms
        self._users[user] = visitor
        visitor.open = [visit for visit in visitor.open if time_ms - visit.time_ms <= self._ttl_ms]
        for visit in visitor.open:
            visit.returns += 1
        visitor.cell = int(np.searchsorted(VISIT_COUNTS, visitor.count)) * self._gaps + gap
        self._clock_ms = max(self._clock_ms, time_ms)
        self._close()
        if len(self._pending) < MAX_PENDING:
            visit = _Visit(time_ms, visitor.cell)
            visitor.open.append(visit)
            self._pending.append(visit)

    def expect(self, user: int) -> float:
        """Expected requests of a user within the TTL after his last one."""
        visitor = self._users.get(user)
        if visitor is None:
            return 1.0
        return float(self._table.mean(visitor.cell, self._prior(visitor)))

    def _prior(self, visitor: _Visitor) -> float:
        """The rate of his decayed count, which for a steady visitor is that of his requests."""
        return visitor.count * math.log(2) * self._ttl_ms / DAY_MS

    def _close(self) -> None:
        """Learns from visits whose TTL has passed: those that nobody came back after count as well."""
        while self._pending and self._clock_ms - self._pending[0].time_ms > self._ttl_ms:
            visit = self._pending.popleft()
            self._table.add(np.array([visit.cell]), np.array([float(visit.returns)]))


class Trends:
    """Whether ads are asked for more or less than they were, by counts in a fixed number of slots: an ad is a hash already."""

    def __init__(self) -> None:
        self._fast, self._slow = np.zeros(TREND_SLOTS), np.zeros(TREND_SLOTS)
        self._clock_ms: int | None = None

    def observe(self, ads: NDArray[np.uint64], time_ms: int) -> None:
        """Asks for ads u8[n] at a moment."""
        since = 0 if self._clock_ms is None else time_ms - self._clock_ms
        if since > 60_000:  # not at each request: the whole table is touched
            self._fast *= 0.5 ** (since / FAST_MS)
            self._slow *= 0.5 ** (since / SLOW_MS)
        if self._clock_ms is None or since > 60_000:
            self._clock_ms = time_ms
        slots = self._slots(ads)
        np.add.at(self._fast, slots, 1.0)
        np.add.at(self._slow, slots, 1.0)

    def of(self, ads: NDArray[np.uint64]) -> NDArray[np.int64]:
        """0 falling, 1 steady or unknown, 2 rising; i8[n]."""
        slots = self._slots(ads)
        # Rates per time: a steady ad has counts in proportion to the half-lives.
        ratio = (self._fast[slots] / FAST_MS + 1e-12) / (self._slow[slots] / SLOW_MS + 1e-12)
        return np.where(ratio > RISING, 2, np.where(ratio < FALLING, 0, 1))

    @staticmethod
    def _slots(ads: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (ads % np.uint64(TREND_SLOTS)).astype(np.int64)


class Outlook:
    """The value of pairs, learned from served requests.

    Args:
        ttl_ms: of the rows.
    """

    def __init__(self, ttl_ms: int) -> None:
        self.returns, self.trends = Returns(ttl_ms), Trends()
        self._asked = RateTable((len(RANKS) + 1) * NUM_TRENDS, PERSISTENCE_STRENGTH)
        self._moved = RateTable(len(Level), GAIN_STRENGTH)
        self._still = RateTable(len(Level), GAIN_STRENGTH)
        self._prior = np.array([GAIN_PRIOR[Level(level)] for level in range(len(Level))])

    def learn(self, before: Slate, after: Slate) -> None:
        """The next request of a user, after one whose candidates are known."""
        if not len(before.ads):
            return
        order = np.argsort(after.ads, kind="stable")
        at = order[np.minimum(np.searchsorted(after.ads[order], before.ads), len(order) - 1)]
        asked = after.ads[at] == before.ads
        self._asked.add(self._cells(before), asked.astype(np.float64))
        scored = asked & ~before.explored  # the explorer's had no score that could move
        then, now = before.levels[scored], after.levels[at[scored]]
        move = np.minimum((after.logits[at[scored]] - before.logits[scored]) ** 2, MAX_MOVE)
        fresh, same = now == Level.PAIR_FRESH, now == then
        self._moved.add(then[fresh], move[fresh])
        self._still.add(then[same], move[same])

    def persistence(self, slate: Slate) -> NDArray[np.float64]:
        """P(asked for again | the user returns) of each candidate, by its place in the answer and the trend of the ad, f8[n]."""
        prior = np.where(slate.explored, EXPLORED_PRIOR, PERSISTENCE_PRIOR)
        return self._asked.mean(self._cells(slate), prior)

    def gains(self) -> NDArray[np.float64]:
        """Gain of having a fresh row instead of what is there, by level, f8[levels]: mean squared logit move beyond that of rest."""
        levels = np.arange(len(Level))
        moved = self._moved.mean(levels, self._prior)
        return np.maximum(moved - self._still.mean(levels, 0.0) * (levels != Level.PAIR_FRESH), LEAST_GAIN)

    def _cells(self, slate: Slate) -> NDArray[np.int64]:
        """Trends are as they stand, also when a request teaches: what it asks for is not among them yet."""
        place = np.searchsorted(RANKS, slate.ranks, side="right")
        cells: NDArray[np.int64] = place * NUM_TRENDS + self.trends.of(slate.ads)
        return cells
