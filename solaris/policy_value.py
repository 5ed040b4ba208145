"""The product's policy: expected uses of a row = expected returns of the user within the TTL x persistence of the candidate.

Both factors are small calibrated models on the past only. The persistence model is Poisson boosting with the expected returns as its
exposure: of so many expected requests of this user, how many will ask for this ad again? Its features are the pair's own past, the
rank, the surface and what the ad's popularity does.

Shapes: R requests, N candidates, H horizons, F features of a pair, S surfaces, A ads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from solaris.policies import frequency_values
from solaris.returns import SHARES, UserClock
from solaris.trace import DAY_MS, HOUR_MS, NONE, Trace

CHUNK = 2_000  # requests scored at once
NUM_SAMPLES = 600_000  # pairs of one fit
LEAST_RETURNS = 0.02  # exposure never falls below this
TAIL_POINTS = 13
FAST_HOURS, SLOW_HOURS = 2.0, 12.0


class PairFeatures:
    """What is known of the candidates of a request when it has been answered.

    Args:
        trace: the requests.
        returns: f4[R, H]; expected requests of the user within each horizon.
    """

    def __init__(self, trace: Trace, returns: NDArray[np.float32]) -> None:
        self._trace, self._returns = trace, returns
        self.frequency = frequency_values(trace)
        place = np.empty(trace.candidates.size, dtype=np.int16)
        place[trace.asks.flat] = trace.asks.place
        self._place = place.reshape(trace.candidates.shape)
        self._since = _since_last_ask(trace).reshape(trace.candidates.shape)
        clock = UserClock(trace)
        order = trace.by_user
        count = np.empty(len(trace), dtype=np.float32)
        starts = np.searchsorted(trace.users[order], trace.users)
        count[order] = np.arange(len(trace)) - starts[order] + 1
        same = np.zeros(len(trace), dtype=bool)
        known = trace.previous != NONE
        same[known] = trace.surfaces[known] == trace.surfaces[trace.previous[known]]
        self._per_request = np.stack(
            [trace.surfaces, same, np.log1p(count), clock.within(-DAY_MS, 0), clock.within(-HOUR_MS, 0),
             np.log(np.maximum(returns[:, -1], LEAST_RETURNS)), returns[:, 1] / np.maximum(returns[:, -1], LEAST_RETURNS),
             (trace.times_ms + trace.zone_ms) % DAY_MS / HOUR_MS], axis=1,
        ).astype(np.float32)  # fmt: skip
        self._count = count
        self._shown = np.zeros(trace.candidates.shape, dtype=bool)
        self._shown[trace.shown_request, trace.shown_position] = True
        self._hour, self._trend = _popularity(trace)

    def of(self, requests: NDArray[np.int64]) -> NDArray[np.float32]:
        """f4[r * N, F] of some requests."""
        trace = self._trace
        shape = (len(requests), trace.num_candidates)
        ads = trace.candidates[requests]
        hour, surface = self._hour[requests][:, None], trace.surfaces[requests][:, None]
        own, every = self._trend
        place = self._place[requests]
        columns = [
            np.broadcast_to(np.arange(shape[1]), shape),
            place,
            self.frequency[requests],
            self._since[requests],
            (place + 1) / self._count[requests][:, None],
            self._shown[requests],
            own[0][hour, surface, ads],
            own[1][hour, surface, ads],
            every[0][hour, ads],
            every[1][hour, ads],
        ]
        columns += [np.broadcast_to(column[:, None], shape) for column in self._per_request[requests].T]
        return np.stack([np.asarray(column, dtype=np.float32).ravel() for column in columns], axis=1)


def true_uses(trace: Trace, ttl_ms: int) -> NDArray[np.int16]:
    """Asks of each candidate's pair in (t, t + TTL] after its request. i2[R, N]."""
    asks, num = trace.asks, trace.num_candidates
    times = trace.times_ms - trace.times_ms[0] if len(trace) else trace.times_ms
    result = np.empty(trace.candidates.size, dtype=np.int16)
    span = 2**32  # longer than any trace and TTL together; times the pairs still an int64
    step = 4_000_000
    pairs = trace.pairs.ravel()
    cuts = [*asks.pair_start[np.searchsorted(asks.pair_start, np.arange(0, len(asks.flat), step))].tolist(), len(asks.flat)]
    # by runs of whole pairs, to bound memory
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        flat = asks.flat[low:high]
        base = pairs[flat].astype(np.int64) * span
        now = times[flat // num]
        end = np.searchsorted(base + now, base + now + ttl_ms, side="right")
        result[flat] = end - np.arange(len(flat)) - 1
    return result.reshape(trace.candidates.shape)


def persistence(
    trace: Trace,
    pair_features: PairFeatures,
    returns: NDArray[np.float32],
    uses: NDArray[np.int16],
    ttl_ms: int,
    fits_ms: list[int],
    *,
    seed: int = 0,
) -> NDArray[np.float32]:
    """Share of the user's expected requests that ask for a candidate again; models know only what has happened by their fit.

    Args:
        trace: the requests. pair_features: of them.
        returns: f4[R, H]; expected requests, > 0 from some request on: those are fitted.
        uses: i2[R, N] from `true_uses`; read only where the TTL has passed by the time of the fit.
        ttl_ms: of the rows.
        fits_ms: moments of the fits, rising; each serves until the next; zeros before the first.
        seed: of the sample.

    Returns:
        f4[R, N].
    """
    result = np.zeros(trace.candidates.shape, dtype=np.float32)
    rng = np.random.default_rng(seed)
    ends = [*fits_ms[1:], int(trace.times_ms[-1]) + 1]
    exposure = np.maximum(returns[:, -1], LEAST_RETURNS)
    for fit_ms, end_ms in zip(fits_ms, ends, strict=True):
        known = np.arange(int(np.searchsorted(trace.times_ms, fit_ms - ttl_ms)))
        known = known[returns[known, -1] > 0]
        serve = np.arange(*np.searchsorted(trace.times_ms, [fit_ms, end_ms]))
        model = _fit(trace, pair_features, exposure, uses, known, rng)
        for part in _chunks(serve):
            result[part] = model.predict(pair_features.of(part)).reshape(len(part), -1)
    return result


def tails(returns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Share of the expected returns that fall after the first t / 12 of the TTL. f4[R, 13] from f4[R, H]."""
    knots = np.concatenate([[0.0], SHARES])
    grid = np.linspace(0, 1, TAIL_POINTS)
    right = np.searchsorted(knots, grid).clip(1)
    weight = ((grid - knots[right - 1]) / (knots[right] - knots[right - 1])).astype(np.float32)
    padded = np.concatenate([np.zeros((len(returns), 1), np.float32), returns], axis=1)
    upto = padded[:, right - 1] * (1 - weight) + padded[:, right] * weight
    return 1 - upto / np.maximum(upto[:, -1:], 1e-6)


def _fit(
    trace: Trace,
    pair_features: PairFeatures,
    exposure: NDArray[np.float32],
    uses: NDArray[np.int16],
    known: NDArray[np.int64],
    rng: np.random.Generator,
) -> HistGradientBoostingRegressor:
    num = trace.num_candidates
    kept = min(len(known), max(1, NUM_SAMPLES // num))
    # users with expected returns are what is bought, so they are fitted
    chance = np.minimum(exposure[known], 3.0).astype(np.float64)
    sample = np.sort(rng.choice(known, kept, replace=False, p=chance / chance.sum()))
    x = np.concatenate([pair_features.of(part) for part in _chunks(sample)])
    expected = np.repeat(exposure[sample], num)
    model = HistGradientBoostingRegressor(
        loss="poisson", learning_rate=0.12, max_iter=60, max_leaf_nodes=20, min_samples_leaf=400, early_stopping=False, random_state=0
    )
    return model.fit(x, uses[sample].ravel() / expected, sample_weight=expected)


def _chunks(requests: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    yield from (requests[i : i + CHUNK] for i in range(0, len(requests), CHUNK))


def _since_last_ask(trace: Trace) -> NDArray[np.float32]:
    """Hours since the pair's ask before this one; nan for the first. f4[R * N]."""
    asks, num = trace.asks, trace.num_candidates
    result = np.full(trace.candidates.size, np.nan, dtype=np.float32)
    again = np.flatnonzero(asks.place > 0)
    now, then = trace.times_ms[asks.flat[again] // num], trace.times_ms[asks.flat[again - 1] // num]
    result[asks.flat[again]] = (now - then) / HOUR_MS
    return result


Trend = tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]


def _popularity(trace: Trace) -> tuple[NDArray[np.int64], Trend]:
    """Log popularity of ads among the shown at the start of each hour, and its fast part over the slow one.

    Returns:
        hour of each request i8[R], and ([slow, trend] f4[hours, S, A], [slow, trend] f4[hours, A]).
    """
    hours = trace.times_ms // HOUR_MS
    hours = hours - hours[0]
    ads = trace.candidates[trace.shown_request, trace.shown_position]
    num_hours, num_surfaces = int(hours[-1]) + 1, int(trace.surfaces.max()) + 1
    own = [np.zeros((num_hours, num_surfaces, trace.num_ads), dtype=np.float32) for _ in range(2)]
    order = np.argsort(hours[trace.shown_request], kind="stable")
    cuts = np.searchsorted(hours[trace.shown_request][order], np.arange(num_hours + 1))
    for hour in range(1, num_hours):
        part = order[cuts[hour - 1] : cuts[hour]]
        for counts, half_life in zip(own, (SLOW_HOURS, FAST_HOURS), strict=True):
            counts[hour] = counts[hour - 1]
            np.add.at(counts[hour], (trace.surfaces[trace.shown_request[part]], ads[part]), 1.0)
            counts[hour] *= 0.5 ** (1 / half_life)
    slow, fast = own
    every = [slow.sum(axis=1), fast.sum(axis=1)]
    return hours, ([np.log1p(slow), _trend(slow, fast)], [np.log1p(every[0]), _trend(*every)])


def _trend(slow: NDArray[np.float32], fast: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.log((fast / FAST_HOURS + 0.1) / (slow / SLOW_HOURS + 0.1))
