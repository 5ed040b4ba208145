"""The trace-driven simulator of speculation: what a policy would have had in the store, at which cost, when rankers asked.

Requests are replayed in order of time. When a request of a user has just been answered, the policy may have pairs of this user computed,
and at no other moment; it knows that request and those before it. A row is readable `lag_ms` after its trigger (later where the FM has
finite capacity and a queue) and until its TTL, which is honoured on read. Policies are compared at equal compute: a budget of FM pair
inferences per requested pair, refreshes and waste included. The ledger of the report starts at zero and never goes below: what is spent
is at most the budget times what was requested so far, so no policy can borrow from the future.

Shapes: R requests, N candidates, P pairs, n pairs proposed at one trigger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from solaris.simulate_price import Price
from solaris.trace import DAY_MS, NONE, Trace

LAG_MS = 5_000
NEVER_MS = -(2**62)
AGE_BINS_MS = np.concatenate([[0], np.geomspace(1_000, 100 * DAY_MS, 400)])


@dataclass(frozen=True)
class Setting:
    """What all policies of a comparison share.

    Attributes:
        budget: FM pair inferences per requested pair.
        ttl_ms: a row is read until this age, inclusive.
        start_ms: the replay begins here (warm-up until the trace's `report_ms`).
        lag_ms: from the trigger to a readable row, for log, batch, FM and publish; inclusive.
        pairs_per_s: capacity of the FM; jobs wait in one line in order of arrival. None = unbounded.
        request_pairs: cost of a user's run (f_R) in units of a pair (f_C), paid from the same ledger.
        max_rows: rows that the store keeps of a user, least recently computed or read first out; None = all.
    """

    budget: float
    ttl_ms: int
    start_ms: int
    lag_ms: int = LAG_MS
    pairs_per_s: float | None = None
    request_pairs: float = 0.0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.budget < 0 or self.ttl_ms <= 0 or self.lag_ms < 0:
            raise ValueError(f"budget and lag must not be negative and the TTL must be positive: {self}")


def _no_rows(pairs: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.full(len(pairs), NONE, dtype=np.int64)


@dataclass(frozen=True)
class Moment:
    """A request that has just been answered: all that a policy sees of the store.

    Attributes:
        request: its index; a policy may use this request and those before it.
        pairs: i4[N]; its candidates' pairs.
        left_ms: i8[N]; remaining life of each candidate's newest row, negative where there is none.
        left_of: the same of any other pairs of the user, i8[n] from i4[n]; pairs numbered as by
            `Trace.pairs_of`.
    """

    request: int
    pairs: NDArray[np.int32]
    left_ms: NDArray[np.int64]
    left_of: Callable[[NDArray[np.int32]], NDArray[np.int64]] = field(default=_no_rows, repr=False)


class Policy(Protocol):
    """Proposes pairs at a moment.

    Attributes:
        name: for tables.
        priced: whether proposals below the price are dropped; otherwise they are bought, best first, as far as the ledger goes.
    """

    name: str
    priced: bool

    def propose(self, moment: Moment) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(pairs i4[n] of the moment's user, negative = never asked for, see `Trace.pairs_of`; value of each f4[n])."""
        ...


@dataclass
class Result:
    """One policy on one trace under one setting; measures count from the trace's `report_ms` on.

    Attributes:
        policy: its name.
        hits: f8[R]; candidates of each request with a readable row (0 before the replay began).
        shown_hits: f8[R]; shown ads of each request with a readable row.
        computed: f8[R]; inferences triggered by each request. runs: f8[R]; 1 where there was at least one.
        useful: rows computed in the report and hit at least once. rows: rows computed in the report.
        ages: counts of hits by age, bins `AGE_BINS_MS`.
        user_rows: f8[R]; 1 where a request found any readable row of its user, whatever its ad.
    """

    policy: str
    hits: NDArray[np.float64]
    shown_hits: NDArray[np.float64]
    computed: NDArray[np.float64]
    runs: NDArray[np.float64]
    user_rows: NDArray[np.float64]
    useful: float = 0.0
    rows: float = 0.0
    ages: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(AGE_BINS_MS) - 1, dtype=np.int64))

    @classmethod
    def empty(cls, policy: str, trace: Trace) -> Result:
        """Nothing computed, nothing hit."""
        zeros = [np.zeros(len(trace)) for _ in range(5)]
        return cls(policy, zeros[0], zeros[1], zeros[2], zeros[3], zeros[4])

    def age_quantile(self, q: float) -> float | None:
        """Age at hit in ms, to the width of a bin (6 %); None without hits."""
        total = self.ages.sum()
        if not total:
            return None
        return float(AGE_BINS_MS[1:][np.searchsorted(np.cumsum(self.ages), q * total)])


@dataclass
class _Job:
    """Rows on their way into the store."""

    ready_ms: int
    pairs: NDArray[np.int32]
    time_ms: int


class _Store:
    """Rows by pair: when computed, and whether read yet; what is under way is kept by user until it is readable."""

    def __init__(self, trace: Trace, setting: Setting, result: Result) -> None:
        self.computed_ms = np.full(trace.num_pairs, NEVER_MS, dtype=np.int64)
        self.unread = np.zeros(trace.num_pairs, dtype=bool)
        self._touched = np.zeros(trace.num_pairs, dtype=np.int64) if setting.max_rows else None
        self._trace, self._setting, self._result = trace, setting, result
        self._jobs: dict[int, list[_Job]] = {}
        # rows of pairs that nobody will ask for cost like others, and their policy must see that it has them: by user i8[A]
        self._idle_ms: dict[int, NDArray[np.int64]] = {}
        self._newest_ms: dict[int, int] = {}
        self._free_ms = float(NEVER_MS)

    def settle(self, user: int, now_ms: int) -> None:
        """Makes the user's finished rows readable."""
        jobs = self._jobs.get(user)
        if not jobs:
            return
        for job in jobs:
            if job.ready_ms <= now_ms:
                self._newest_ms[user] = job.time_ms
                self.computed_ms[job.pairs] = job.time_ms
                self.unread[job.pairs] = job.time_ms >= self._trace.report_ms
                if self._touched is not None:
                    self._touched[job.pairs] = job.time_ms
                    self._evict(job.pairs)
        self._jobs[user] = [job for job in jobs if job.ready_ms > now_ms]

    def read(self, request: int, pairs: NDArray[np.int32], now_ms: int) -> NDArray[np.int64]:
        """Reads the rows of a request's pairs; returns their remaining life in ms, i8[N]."""
        age = now_ms - self.computed_ms[pairs]
        live = age <= self._setting.ttl_ms
        hits = int(np.count_nonzero(live))
        result = self._result
        if hits:
            hit = pairs[live]
            result.hits[request] = hits
            if self._touched is not None:
                self._touched[hit] = now_ms
            if now_ms >= self._trace.report_ms:
                result.useful += np.count_nonzero(self.unread[hit])
                self.unread[hit] = False
                ages, counts = np.unique(age[live], return_counts=True)
                np.add.at(result.ages, np.searchsorted(AGE_BINS_MS, ages, side="right") - 1, counts)
        return self._setting.ttl_ms - age

    def submit(self, user: int, pairs: NDArray[np.int32], now_ms: int) -> None:
        """Sends pairs to the FM."""
        ready = float(now_ms)
        if self._setting.pairs_per_s is not None:
            # one line, first come first served
            self._free_ms = max(self._free_ms, ready) + 1_000 * len(pairs) / self._setting.pairs_per_s
            ready = self._free_ms
        asked, idle = pairs[pairs >= 0], pairs[pairs < 0]
        if len(idle):
            if user not in self._idle_ms:
                self._idle_ms[user] = np.full(self._trace.num_ads, NEVER_MS, dtype=np.int64)
            self._idle_ms[user][NONE - idle] = now_ms
        self._jobs.setdefault(user, []).append(_Job(int(np.ceil(ready)) + self._setting.lag_ms, asked, now_ms))

    def has_rows(self, user: int, now_ms: int) -> bool:
        """Whether any row of the user is readable."""
        return now_ms - self._newest_ms.get(user, NEVER_MS) <= self._setting.ttl_ms

    def add_under_way(self, user: int, pairs: NDArray[np.int32], left_ms: NDArray[np.int64], now_ms: int) -> None:
        """Counts rows that are not readable yet into the remaining lives `left_ms` i8[n] of the user's pairs i4[n], in place."""
        for job in self._jobs.get(user, ()):
            left_ms[np.isin(pairs, job.pairs)] = self._setting.ttl_ms - (now_ms - job.time_ms)

    def left(self, user: int, pairs: NDArray[np.int32], *, now_ms: int) -> NDArray[np.int64]:
        """Remaining life in ms of the newest row of each of the user's pairs i4[n], also of one under way; negative without. i8[n]."""
        idle = pairs < 0
        computed_ms = self.computed_ms[np.where(idle, 0, pairs)]
        computed_ms[idle] = self._idle_ms[user][NONE - pairs[idle]] if user in self._idle_ms else NEVER_MS
        left_ms = self._setting.ttl_ms - (now_ms - computed_ms)
        self.add_under_way(user, pairs, left_ms, now_ms)
        return left_ms

    def _evict(self, pairs: NDArray[np.int32]) -> None:
        """Keeps the newest `max_rows` of the user whose pairs these are: a user's pairs are neighbours."""
        if self._touched is None or not len(pairs):
            return
        low, high = self._user_range(int(pairs[0]))
        live = low + np.flatnonzero(self.computed_ms[low:high] > NEVER_MS)
        excess = len(live) - (self._setting.max_rows or 0)
        if excess > 0:
            out = live[np.argsort(self._touched[live], kind="stable")[:excess]]
            self.computed_ms[out] = NEVER_MS
            self.unread[out] = False

    def _user_range(self, pair: int) -> tuple[int, int]:
        starts = self._trace.user_pairs
        user = int(np.searchsorted(starts, pair, side="right")) - 1
        return int(starts[user]), int(starts[user + 1])


def simulate(trace: Trace, policy: Policy, setting: Setting) -> Result:
    """Replays a trace under a policy.

    Args:
        trace: the requests.
        policy: proposes pairs; it is asked once per request from `start_ms` on, in order of time.
        setting: budget, TTL, lag.
    """
    result = Result.empty(policy.name, trace)
    store = _Store(trace, setting, result)
    price = Price(setting.budget)
    ledger = 0.0
    in_report = False
    shown = _Shown(trace)
    first = int(np.searchsorted(trace.times_ms, setting.start_ms))
    for request in range(first, len(trace)):
        now = int(trace.times_ms[request])
        if not in_report and now >= trace.report_ms:
            in_report, ledger = True, 0.0
        user = int(trace.users[request])
        store.settle(user, now)
        pairs = trace.pairs[request]
        left = store.read(request, pairs, now)
        live = left >= 0
        result.shown_hits[request] = np.count_nonzero(live[shown.of(request)])
        result.user_rows[request] = float(store.has_rows(user, now))
        store.add_under_way(user, pairs, left, now)
        ledger += setting.budget * len(pairs)
        proposed, values = policy.propose(Moment(request, pairs, left, partial(store.left, user, now_ms=now)))
        if policy.priced:
            price.observe(now, values, len(pairs), ledger)
            keep = values > price.value
            proposed, values = proposed[keep], values[keep]
        afford = int(ledger - setting.request_pairs)
        if not len(proposed) or afford <= 0:
            continue
        if len(proposed) > afford:
            proposed = proposed[np.argsort(-values, kind="stable")[:afford]]
        store.submit(user, proposed, now)
        ledger -= len(proposed) + setting.request_pairs
        result.computed[request] = len(proposed)
        result.runs[request] = 1
        result.rows += len(proposed) * in_report
    return result


class _Shown:
    """Positions of the shown ads of a request."""

    def __init__(self, trace: Trace) -> None:
        order = np.argsort(trace.shown_request, kind="stable")
        self._positions = trace.shown_position[order]
        self._cuts = np.searchsorted(trace.shown_request[order], np.arange(len(trace) + 1)).tolist()

    def of(self, request: int) -> NDArray[np.int16]:
        """i2[c]."""
        return self._positions[self._cuts[request] : self._cuts[request + 1]]
