"""Policies of speculation that need no model: the baselines to beat, and the shape that all priced policies share.

A policy proposes pairs of the user whose request has just been answered (`solaris.simulate.Moment`). Unpriced policies spend whatever the
ledger holds; priced ones buy what is worth more than the price. Shapes: R requests, N candidates, n proposed pairs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solaris.simulate import Moment
from solaris.trace import DAY_MS, HOUR_MS, NONE, Trace

Proposal = tuple[NDArray[np.int32], NDArray[np.float32]]
NOTHING: Proposal = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


class Nothing:
    """Computes nothing."""

    name, priced = "nothing", False

    def propose(self, moment: Moment) -> Proposal:
        """No pair."""
        return NOTHING


class ReactiveFill:
    """Computes what was just asked for and missing, best ranked first: the cache that fills itself."""

    name, priced = "reactive_ranked", False

    def __init__(self, trace: Trace) -> None:
        self._value = by_rank(trace.num_candidates)

    def propose(self, moment: Moment) -> Proposal:
        """The misses."""
        missing = moment.left_ms < 0
        return moment.pairs[missing], self._value[missing]


class TtlRefresh:
    """Renews a user's rows once they have lived half their TTL, before it fills misses.

    Args:
        trace: the requests.
        ttl_ms: of the rows.
    """

    name, priced = "ttl_refresh", False

    def __init__(self, trace: Trace, ttl_ms: int) -> None:
        self._value, self._half_ms = by_rank(trace.num_candidates), ttl_ms // 2

    def propose(self, moment: Moment) -> Proposal:
        """Rows past half their life first, then the misses."""
        due = moment.left_ms < self._half_ms
        value = self._value + 2.0 * (moment.left_ms >= 0)
        return moment.pairs[due], value[due]


class PopularAds:
    """Computes the ads asked for most often by all users on the surface, for any user who turns up.

    Args:
        trace: the requests.
        num: most popular ads that are considered; 0 = as many as a request has candidates.
    """

    name, priced = "user_x_popular", False

    def __init__(self, trace: Trace, num: int = 0) -> None:
        self._trace, self._num = trace, num or trace.num_candidates
        self._counts = np.zeros((int(trace.surfaces.max(initial=0)) + 1, trace.num_ads), dtype=np.float64)
        self._top: dict[int, NDArray[np.int16]] = {}
        self._hour, self._seen = NONE, 0

    def propose(self, moment: Moment) -> Proposal:
        """The most popular ads of the surface, those that the user has a row of excepted."""
        trace, request = self._trace, moment.request
        self._count(request)
        surface = int(trace.surfaces[request])
        if surface not in self._top:
            best = np.argsort(-self._counts[surface], kind="stable")[: self._num]
            self._top[surface] = best[self._counts[surface][best] > 0].astype(np.int16)
        ads = self._top[surface]
        pairs = trace.pairs_of(int(trace.users[request]), ads)
        due = moment.left_of(pairs) < 0
        return pairs[due], by_rank(max(len(ads), 1))[: len(ads)][due]

    def _count(self, request: int) -> None:
        """Popularity is a snapshot of the asks before the hour of the request, halved every 12 hours."""
        trace = self._trace
        hour = int(trace.times_ms[request]) // HOUR_MS
        if hour == self._hour:
            return
        end = int(np.searchsorted(trace.times_ms, hour * HOUR_MS))
        if self._hour != NONE:
            self._counts *= 0.5 ** ((hour - self._hour) / 12)
        for surface in np.unique(trace.surfaces[self._seen : end]).tolist():
            rows = self._seen + np.flatnonzero(trace.surfaces[self._seen : end] == surface)
            self._counts[surface] += np.bincount(trace.candidates[rows].ravel(), minlength=trace.num_ads)
        self._seen, self._hour, self._top = end, hour, {}


class Table:
    """Any policy whose value of a candidate, when it has no row, is a number known after the request was answered.

    A pair that still has a readable row is proposed only for what a new one would add: the share of its uses that lie beyond the old
    row's end.

    Args:
        name: for tables.
        values: f4[R, N]; expected uses of a new row within the TTL.
        tail: f4[R, T]; share of these uses that fall after the first t / (T - 1) of the TTL; None = a row is not renewed while it lives.
        ttl_ms: of the rows.
        caution: a renewal must be worth this times the price: whoever waits may still renew later.
        priced: see `solaris.simulate.Policy`.
    """

    def __init__(
        self,
        name: str,
        values: NDArray[np.float32],
        tail: NDArray[np.float32] | None,
        ttl_ms: int,
        *,
        caution: float = 1.0,
        priced: bool = True,
    ) -> None:
        self.name, self.priced = name, priced
        self._values, self._tail, self._ttl_ms, self._caution = values, tail, ttl_ms, caution
        self._grid = np.linspace(0, ttl_ms, tail.shape[1]) if tail is not None else np.zeros(0)

    def propose(self, moment: Moment) -> Proposal:
        """All candidates that a new row would serve better."""
        value = self._values[moment.request]
        live = moment.left_ms >= 0
        if not live.any():
            return moment.pairs, value
        if self._tail is None:
            return moment.pairs[~live], value[~live]
        share = np.interp(moment.left_ms[live], self._grid, self._tail[moment.request]) / self._caution
        value = value.copy()
        value[live] *= share
        return moment.pairs, value


class Listed:
    """A priced policy that proposes listed ads of all, not only candidates of the request that has just been answered.

    Args:
        name: for tables.
        first: the first request that has a list.
        pairs: i4[r, K]; of each request from `first` on, numbered as by `Trace.pairs_of`.
        values: f4[r, K]; of a new row of each.
        tail, ttl_ms, caution: as of `Table`.
    """

    priced = True

    def __init__(
        self,
        name: str,
        first: int,
        pairs: NDArray[np.int32],
        values: NDArray[np.float32],
        tail: NDArray[np.float32],
        ttl_ms: int,
        *,
        caution: float = 1.0,
    ) -> None:
        self.name = name
        self._first, self._pairs, self._values = first, pairs, values
        self._tail, self._caution = tail, caution
        self._grid = np.linspace(0, ttl_ms, tail.shape[1])

    def propose(self, moment: Moment) -> Proposal:
        """The listed ads; of one with a live row only what a new row would add."""
        row = moment.request - self._first
        if row < 0:
            return NOTHING
        pairs = self._pairs[row]
        left, value = moment.left_of(pairs), self._values[row].astype(np.float32)
        live = left >= 0
        if live.any():
            value[live] *= np.interp(left[live], self._grid, self._tail[moment.request]) / self._caution
        return pairs, value


def numbered(trace: Trace, first: int, ads: NDArray[np.int16]) -> NDArray[np.int32]:
    """Pairs of the users of the requests from `first` on with listed ads i2[r, K]. i4[r, K]."""
    result = np.empty(ads.shape, dtype=np.int32)
    for row, listed in enumerate(ads):
        result[row] = trace.pairs_of(int(trace.users[first + row]), listed)
    return result


def by_rank(num: int) -> NDArray[np.float32]:
    """Values that only order: the best ranked first. f4[num], in (0, 1]."""
    return (1 - np.arange(num) / num).astype(np.float32)


def frequency_values(trace: Trace, half_life_ms: int = DAY_MS) -> NDArray[np.float32]:
    """How often a user asked for a pair lately: asks so far, this one included, each halved per half-life. f4[R, N]."""
    asks, num = trace.asks, trace.num_candidates
    result = np.empty(trace.candidates.size, dtype=np.float32)
    request = asks.flat // num
    rate = np.log(2) / half_life_ms
    times = trace.times_ms
    current = np.zeros(trace.num_pairs, dtype=np.float32)
    then = np.zeros(trace.num_pairs, dtype=np.int64)
    order = np.argsort(asks.place, kind="stable")
    cuts = np.concatenate([[0], np.cumsum(np.bincount(asks.place))])
    pair = np.repeat(np.arange(trace.num_pairs, dtype=np.int32), np.diff(asks.pair_start))
    # the k-th asks of all pairs at once
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        at = order[low:high]
        p, now = pair[at], times[request[at]]
        current[p] = current[p] * np.exp(-rate * (now - then[p])) + 1
        then[p] = now
        result[asks.flat[at]] = current[p]
    return result.reshape(trace.candidates.shape)


def user_frequency_values(trace: Trace, half_life_ms: int = DAY_MS) -> NDArray[np.float32]:
    """How often a user came lately, this request included, each time halved per half-life; the same for all candidates. f4[R, N]."""
    result = np.empty(len(trace), dtype=np.float32)
    last: dict[int, tuple[float, int]] = {}
    for r, (user, now) in enumerate(zip(trace.users.tolist(), trace.times_ms.tolist(), strict=True)):
        count, then = last.get(user, (0.0, now))
        count = count * 0.5 ** ((now - then) / half_life_ms) + 1
        last[user] = count, now
        result[r] = count
    return np.broadcast_to(result[:, None], trace.candidates.shape)


def random_order(trace: Trace, seed: int = 0) -> NDArray[np.float32]:
    """Values without any preference: a queue of misses that knows nothing of ranks. f4[R, N]."""
    return np.random.default_rng(seed).random(trace.candidates.shape, dtype=np.float32)
