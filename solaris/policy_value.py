"""The product's policy: expected uses of a row = expected uses of the user's slate x how much more or less a candidate persists.

Both factors are small calibrated models on the past only. The first foresees, for a request that has just been answered, how often the
mean candidate of it will be asked for again within the TTL: the returns of the user and the stability of his slates in one, with a label
far less noisy than that of a pair. The second is Poisson boosting over pairs with the first as its exposure: the pair's own past, the
rank, the surface and what the ad's popularity does. A third, on returns alone, says when within the TTL the uses will fall, so that a row
that still lives is renewed only for what lies beyond its end.

Shapes: R requests, N candidates, H horizons, F features of a pair, S surfaces, A ads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from solaris.returns import SHARES, counts_in_hindsight, expected_returns, predict_counts
from solaris.trace import DAY_MS, HOUR_MS, Trace

CHUNK = 2_000  # requests scored at once
NUM_SAMPLES = 500_000  # pairs of one fit
LEAST_USES = 0.005  # exposure never falls below this
NUM_SEEDS = 2  # models of the slate's uses that are averaged
MAX_USES = 20.0  # one robot must not be the model
FIRST_FIT_DAYS = 2  # days before the first fit whose slates are foreseen for the fit of the pairs
TAIL_POINTS = 13
FAST_HOURS, SLOW_HOURS = 2.0, 12.0


class PairFeatures:
    """What is known of the candidates of a request when it has been answered.

    Args:
        trace: the requests.
        frequency: f4[R, N] from `solaris.policies.frequency_values`.
    """

    def __init__(self, trace: Trace, frequency: NDArray[np.float32]) -> None:
        self._trace, self._frequency = trace, frequency
        place = np.empty(trace.candidates.size, dtype=np.int16)
        place[trace.asks.flat] = trace.asks.place
        self._place = place.reshape(trace.candidates.shape)
        self._since = _since_last_ask(trace).reshape(trace.candidates.shape)
        self._count = _running_count(trace.users)
        on_surface = _running_count(trace.users.astype(np.int64) * 2**15 + trace.surfaces)
        self.slate = np.stack(
            [
                on_surface / self._count,
                on_surface,
                frequency.mean(axis=1),
                (self._place > 0).mean(axis=1),
                self._place.mean(axis=1),
            ],
            axis=1,
        ).astype(np.float32)
        self._shown = np.zeros(trace.candidates.shape, dtype=bool)
        self._shown[trace.shown_request, trace.shown_position] = True
        self._hour, self._trend = _popularity(trace)

    def simple(self, requests: NDArray[np.int64]) -> NDArray[np.float32]:
        """The few that a first attempt would take: rank, the pair's past, how often the user came. f4[r * N, 6]."""
        shape = (len(requests), self._trace.num_candidates)
        columns = [
            np.broadcast_to(np.arange(shape[1]), shape),
            self._place[requests],
            self._frequency[requests],
            self._since[requests],
            np.broadcast_to(self._count[requests][:, None], shape),
            np.broadcast_to(self.slate[requests, 3][:, None], shape),
        ]
        return np.stack([np.asarray(column, dtype=np.float32).ravel() for column in columns], axis=1)

    def of(self, requests: NDArray[np.int64]) -> NDArray[np.float32]:
        """All of them. f4[r * N, F]."""
        trace = self._trace
        shape = (len(requests), trace.num_candidates)
        ads = trace.candidates[requests]
        hour, surface = self._hour[requests][:, None], trace.surfaces[requests][:, None]
        own, every = self._trend
        place = self._place[requests]
        columns = [
            np.broadcast_to(np.arange(shape[1]), shape),
            place,
            self._frequency[requests],
            self._since[requests],
            (place + 1) / self._count[requests][:, None],
            self._shown[requests],
            own[0][hour, surface, ads],
            own[1][hour, surface, ads],
            every[0][hour, ads],
            every[1][hour, ads],
        ]
        per_request = [trace.surfaces[requests], np.log1p(self._count[requests]), *self.slate[requests].T]
        columns += [np.broadcast_to(column[:, None], shape) for column in per_request]
        return np.stack([np.asarray(column, dtype=np.float32).ravel() for column in columns], axis=1)


def true_uses(trace: Trace, ttl_ms: int) -> NDArray[np.int16]:
    """Asks of each candidate's pair in (t, t + TTL] after its request. i2[R, N]."""
    asks, num = trace.asks, trace.num_candidates
    times = trace.times_ms - trace.times_ms[0] if len(trace) else trace.times_ms
    result = np.empty(trace.candidates.size, dtype=np.int16)
    span = 2**32  # longer than any trace and TTL together; times the pairs still an int64
    step = 4_000_000
    pairs = trace.pairs.ravel()
    cuts = [
        *asks.pair_start[np.searchsorted(asks.pair_start, np.arange(0, len(asks.flat), step))].tolist(),
        len(asks.flat),
    ]
    # by runs of whole pairs, to bound memory
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        flat = asks.flat[low:high]
        base = pairs[flat].astype(np.int64) * span
        now = times[flat // num]
        end = np.searchsorted(base + now, base + now + ttl_ms, side="right")
        result[flat] = end - np.arange(len(flat)) - 1
    return result.reshape(trace.candidates.shape)


class ValueModel:
    """Expected uses of a row, learned from what has happened.

    Args:
        trace: the requests.
        ttl_ms: of the rows.
        table: f4[R, G]; features of requests from `solaris.returns.features`.
        pair_features: of their candidates.
        uses: i2[R, N] from `true_uses`; read only where the TTL has passed by the time of a fit.
        seed: of samples and models.
    """

    def __init__(
        self,
        trace: Trace,
        ttl_ms: int,
        table: NDArray[np.float32],
        pair_features: PairFeatures,
        uses: NDArray[np.int16],
        *,
        seed: int = 0,
    ) -> None:
        self._trace, self._ttl_ms, self._seed = trace, ttl_ms, seed
        self._table = np.concatenate([table, pair_features.slate], axis=1)
        self._pair_features, self._uses = pair_features, uses

    def predict(self, fits_ms: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Values and returns, by models that know only what had happened by their fit.

        Args:
            fits_ms: moments of the fits, rising; each serves until the next.

        Returns:
            (expected uses of each candidate f4[R, N], expected requests of the user within each horizon f4[R, H]); zeros before the
            first fit.
        """
        trace = self._trace
        # the pairs are fitted on slates foreseen by a model that had not seen them either
        early = fits_ms[0] - self._ttl_ms - FIRST_FIT_DAYS * DAY_MS
        early = min(max(early, int(trace.times_ms[0]) + self._ttl_ms + DAY_MS), fits_ms[0])
        exposure = np.maximum(self._slate_uses([early, *fits_ms]), LEAST_USES)
        rng = np.random.default_rng(self._seed)
        value = np.zeros(trace.candidates.shape, dtype=np.float32)
        for fit_ms, end_ms in zip(fits_ms, [*fits_ms[1:], int(trace.times_ms[-1]) + 1], strict=True):
            known = np.arange(*np.searchsorted(trace.times_ms, [early, max(early, fit_ms - self._ttl_ms)]))
            serve = np.arange(*np.searchsorted(trace.times_ms, [fit_ms, end_ms]))
            if not len(known) or not self._uses[known].any():
                value[serve] = exposure[serve, None]
                continue
            model = self._fit(exposure, known, rng)
            for part in chunks(serve):
                relative = model.predict(self._pair_features.of(part)).reshape(len(part), -1)
                # the first model keeps the say over the slate's level
                value[part] = exposure[part, None] * relative / np.maximum(relative.mean(axis=1, keepdims=True), 1e-6)
        # when uses fall within the TTL changes little from day to day: one fit serves
        return value, expected_returns(trace, self._ttl_ms, fits_ms[:1], table=self._table)

    def in_hindsight(self, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """A bound for `predict`: its values, with the level of each slate learned from the report's own days of other users. f4[R, N]."""
        trace = self._trace
        until_ms = int(trace.times_ms[-1]) - self._ttl_ms  # later labels are cut off by the end of the trace
        label = self._uses.mean(axis=1, dtype=np.float32)
        levels = [
            counts_in_hindsight(trace, self._table, label, trace.report_ms, until_ms, cap=MAX_USES, seed=self._seed + i)
            for i in range(NUM_SEEDS)
        ]
        learned = np.maximum(np.mean(levels, axis=0), LEAST_USES)
        own = value.mean(axis=1)
        factor = np.where(trace.times_ms >= trace.report_ms, learned / np.maximum(own, LEAST_USES), 1.0)
        return value * factor[:, None].astype(np.float32)

    def _slate_uses(self, fits_ms: list[int]) -> NDArray[np.float32]:
        """Expected uses of the mean candidate of each request. f4[R]."""
        label = self._uses.mean(axis=1, dtype=np.float32)
        seeds = [
            predict_counts(self._trace, self._table, label, self._ttl_ms, fits_ms, cap=MAX_USES, seed=self._seed + i)
            for i in range(NUM_SEEDS)
        ]
        return np.mean(seeds, axis=0)

    def _fit(
        self, exposure: NDArray[np.float32], known: NDArray[np.int64], rng: np.random.Generator
    ) -> HistGradientBoostingRegressor:
        num = self._trace.num_candidates
        kept = min(len(known), max(1, NUM_SAMPLES // num))
        # what is bought are pairs of users with expected uses, so they are fitted
        chance = np.minimum(exposure[known], 3.0).astype(np.float64)
        sample = np.sort(rng.choice(known, kept, replace=False, p=chance / chance.sum()))
        x = np.concatenate([self._pair_features.of(part) for part in chunks(sample)])
        expected = np.repeat(exposure[sample], num)
        model = HistGradientBoostingRegressor(
            loss="poisson",
            learning_rate=0.15,
            max_iter=40,
            max_leaf_nodes=12,
            min_samples_leaf=400,
            early_stopping=False,
            random_state=self._seed,
        )
        return model.fit(x, self._uses[sample].ravel() / expected, sample_weight=expected)


def tails(returns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Share of the expected returns that fall after the first t / 12 of the TTL. f4[R, 13] from f4[R, H]."""
    knots = np.concatenate([[0.0], SHARES])
    grid = np.linspace(0, 1, TAIL_POINTS)
    right = np.searchsorted(knots, grid).clip(1)
    weight = ((grid - knots[right - 1]) / (knots[right] - knots[right - 1])).astype(np.float32)
    padded = np.concatenate([np.zeros((len(returns), 1), np.float32), returns], axis=1)
    upto = padded[:, right - 1] * (1 - weight) + padded[:, right] * weight
    return 1 - upto / np.maximum(upto[:, -1:], 1e-6)


def chunks(requests: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Runs of requests small enough to be scored at once."""
    yield from (requests[i : i + CHUNK] for i in range(0, len(requests), CHUNK))


def _running_count(keys: NDArray[np.integer]) -> NDArray[np.float32]:
    """How often each key has come so far, this time included. f4[R]."""
    order = np.argsort(keys, kind="stable")
    result = np.empty(len(keys), dtype=np.float32)
    result[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order]) + 1
    return result


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
