"""What could be had: the oracle at the policies' own moments and the clairvoyant bound, both exact at any budget.

Of one pair, computing a row covers all its asks from some ask on until the TTL ends; which asks to begin at is, at a price per inference,
solved exactly by dynamic programming from the last ask back. Covered asks are concave in the inferences spent (covering points by
intervals of one length is a totally unimodular problem), so the solutions over all prices, joined by straight lines, are the best that
any policy can do at equal compute, whatever it knows.

Shapes: R requests, N candidates, E = R x N asks in order of (pair, time).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solaris.simulate import Result, Setting
from solaris.trace import NONE, Trace

# inferences are priced at these plus a half; between them the solutions are joined by straight lines
PRICES = (0, 1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 40)


@dataclass(frozen=True)
class _Problem:
    """Asks from the start of the replay on.

    Attributes:
        flat: i4[E]; ask -> index into the flattened candidates.
        covers: i2[E]; asks covered by a row computed for this ask; 0 where it cannot be computed in time.
        trigger: i4[R]; request that triggers the row which serves a request first; the request itself for the clairvoyant.
        waves: asks by how many asks of the pair follow, the last asks first.
    """

    flat: NDArray[np.int32]
    covers: NDArray[np.int16]
    trigger: NDArray[np.int64]
    waves: list[NDArray[np.int64]]


def triggers(trace: Trace, lag_ms: int) -> NDArray[np.int64]:
    """The user's newest request at least `lag_ms` before each request, -1 where there is none. i8[R]."""
    result = trace.previous.copy()
    while True:
        late = (result != NONE) & (trace.times_ms - trace.times_ms[result] < lag_ms)
        if not late.any():
            return result
        result[late] = trace.previous[result[late]]


class Oracle:
    """Best hits at any budget under one TTL.

    Args:
        trace: the requests.
        setting: TTL, lag and start; its budget is not used.
        any_moment: the clairvoyant bound: a row may be computed at any moment, not only after a request of the user.
    """

    def __init__(self, trace: Trace, setting: Setting, *, any_moment: bool = False) -> None:
        self.name = "clairvoyant" if any_moment else "oracle"
        self._trace = trace
        self._problem = _problem(trace, setting, any_moment)
        self._solved: dict[int, Result] = {}

    def at(self, budget: float) -> Result:
        """The best hits for `budget` inferences per requested pair of the report; hits and inferences may be fractions."""
        wanted = budget * np.count_nonzero(self._trace.times_ms >= self._trace.report_ms) * self._trace.num_candidates
        low, high = NONE, len(PRICES) - 1
        # the lowest price at which no more is bought than is wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._solve(PRICES[middle]).rows <= wanted else (middle, high)
        dear = self._solve(PRICES[high])
        if low == NONE:
            return dear
        cheap = self._solve(PRICES[low])
        return _between(dear, cheap, max(0.0, (wanted - dear.rows) / max(cheap.rows - dear.rows, 1.0)))

    def _solve(self, price: int) -> Result:
        """Begins a row wherever more than `price` asks are gained by it."""
        if price not in self._solved:
            self._solved[price] = _solve(self._trace, self._problem, price + 0.5, self.name)
        return self._solved[price]


def _problem(trace: Trace, setting: Setting, any_moment: bool) -> _Problem:
    first = int(np.searchsorted(trace.times_ms, setting.start_ms))
    num = trace.num_candidates
    asks = trace.asks
    kept = asks.flat >= first * num
    flat = asks.flat[kept]
    request = flat // num
    pair = trace.pairs.ravel()[flat]
    times = trace.times_ms - trace.times_ms[first] if len(flat) else trace.times_ms
    if any_moment:
        trigger, computed = np.arange(len(trace)), times - setting.lag_ms
    else:
        trigger = triggers(trace, setting.lag_ms)
        trigger[trigger < first] = NONE
        computed = np.where(trigger != NONE, times[trigger], -(2**40))
    span = 2**32  # longer than any trace and TTL together; times the pairs still an int64
    last = computed[request] + setting.ttl_ms
    # last ask of the same pair at or before the row's end
    key = pair.astype(np.int64) * span + times[request]
    end = np.searchsorted(key, pair.astype(np.int64) * span + np.maximum(last, 0), side="right")
    covers = np.where(last >= times[request], end - np.arange(len(flat)), 0).astype(np.int16)
    boundary = np.flatnonzero(np.concatenate([pair[1:] != pair[:-1], [True]])) if len(pair) else np.zeros(0, int)
    after = boundary[np.searchsorted(boundary, np.arange(len(flat)))] - np.arange(len(flat))
    order = np.argsort(after.astype(np.int16), kind="stable")
    waves = np.split(order, np.cumsum(np.bincount(after))[:-1]) if len(after) else []
    return _Problem(flat, covers, trigger, waves)


def _solve(trace: Trace, problem: _Problem, price: float, name: str) -> Result:
    covers = problem.covers
    best = np.zeros(len(covers) + 1, dtype=np.float32)
    begin = np.zeros(len(covers), dtype=bool)
    for depth, wave in enumerate(problem.waves):
        cover = covers[wave].astype(np.int64)
        skip = best[wave + 1] if depth else np.float32(0)
        # beyond the pair's last ask there is nothing left to gain
        take = cover - price + np.where(cover <= depth, best[np.minimum(wave + cover, len(covers))], 0)
        begin[wave] = (take > skip) & (cover > 0)
        best[wave] = np.maximum(skip, take)
    return _trace_back(trace, problem, begin, name)


def _trace_back(trace: Trace, problem: _Problem, begin: NDArray[np.bool_], name: str) -> Result:
    """Walks the chosen rows of every pair forward, the pairs side by side."""
    hit = np.zeros(trace.candidates.size, dtype=bool)
    result = Result.empty(name, trace)
    num = trace.num_candidates
    depth = np.empty(len(begin), dtype=np.int64)
    for after, wave in enumerate(problem.waves):
        depth[wave] = after
    free = np.concatenate([[0], np.cumsum(depth == 0)])[:-1] if len(depth) else depth
    until = np.zeros(int(free.max(initial=NONE)) + 1, dtype=np.int64)
    for wave in reversed(problem.waves):
        pair = free[wave]
        start = begin[wave] & (wave >= until[pair])
        chosen = wave[start]
        until[pair[start]] = chosen + problem.covers[chosen]
        hit[problem.flat[wave[wave < until[pair]]]] = True
        np.add.at(result.computed, problem.trigger[problem.flat[chosen] // num], 1)
    result.hits = hit.reshape(trace.candidates.shape).sum(axis=1).astype(np.float64)
    shown = hit.reshape(trace.candidates.shape)[trace.shown_request, trace.shown_position]
    result.shown_hits = np.bincount(trace.shown_request, shown, minlength=len(trace)).astype(np.float64)
    result.runs = (result.computed > 0).astype(np.float64)
    result.rows = float(result.computed[trace.times_ms >= trace.report_ms].sum())
    result.useful = result.rows
    return result


def _between(low: Result, high: Result, part: float) -> Result:
    def mix(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        return a + part * (b - a)

    return Result(
        high.policy,
        mix(low.hits, high.hits),
        mix(low.shown_hits, high.shown_hits),
        mix(low.computed, high.computed),
        mix(low.runs, high.runs),
        mix(low.user_rows, high.user_rows),
        low.useful + part * (high.useful - low.useful),
        low.rows + part * (high.rows - low.rows),
    )
