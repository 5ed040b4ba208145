"""Will the user come back, and how often: expected requests of a user within horizons after a request of his, from the past only.

Small Poisson boosting models, one per horizon, on counts in windows, gaps, the clock and what was known before the trace. They are fitted
only on requests whose horizon has passed by the moment of the fit, so nothing is learned from what is still to come.

Shapes: R requests, H horizons, F features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from solaris.trace import DAY_MS, HOUR_MS, NONE, Trace

WINDOWS_HOURS = (1 / 6, 0.5, 1, 2, 3, 6, 9, 12, 18, 24, 36, 48, 72, 96, 144, 400)
# Activity at the same hours of earlier days, aligned with the horizon to come: (days back, hours from the clock's now).
ECHOES = (
    (1, 1),
    (1, 3),
    (1, 6),
    (1, 12),
    (2, 3),
    (2, 12),
    (3, 12),
    (4, 12),
    (5, 12),
    (6, 12),
    (7, 3),
    (7, 12),
    (7, 24),
)
NUM_GAPS = 6
SESSION_MS = HOUR_MS // 2
SHARES = (1 / 4, 1 / 2, 1.0)  # horizons as shares of the TTL
FOLDS = 5  # of users, for the bound
LEAST_FIT = 50  # requests; with fewer a mean must do
MAX_LABEL = 60.0  # one robot must not be the model


def horizons(ttl_ms: int) -> NDArray[np.int64]:
    """The horizons at which returns are predicted for a TTL. i8[H], the last is the TTL."""
    return (np.array(SHARES) * ttl_ms).astype(np.int64)


class UserClock:
    """Counts a user's requests in any window around any request, vectorised."""

    def __init__(self, trace: Trace) -> None:
        self._order = trace.by_user
        times = trace.times_ms - trace.times_ms.min(initial=0)
        self._span = int(times.max(initial=0)) + 400 * DAY_MS
        key = trace.users.astype(np.int64) * self._span + 200 * DAY_MS + times
        self._sorted = key[self._order]
        self._key = key

    def before(self, offset_ms: int) -> NDArray[np.int64]:
        """Requests of the user of each request up to `offset_ms` after it, it and equal moments included, plus a constant. i8[R]."""
        return np.searchsorted(self._sorted, self._key + offset_ms, side="right")

    def within(self, start_ms: int, end_ms: int) -> NDArray[np.float32]:
        """Requests of the same user in (t + start, t + end]. f4[R]."""
        return (self.before(end_ms) - self.before(start_ms)).astype(np.float32)


def true_returns(trace: Trace, ttl_ms: int) -> NDArray[np.float32]:
    """Requests of the user that really follow within each horizon: the label. f4[R, H]."""
    clock = UserClock(trace)
    return np.stack([clock.within(0, int(h)) for h in horizons(ttl_ms)], axis=1)


def features(trace: Trace) -> NDArray[np.float32]:
    """What is known of a user when a request of his has been answered. f4[R, F]; nan where undefined."""
    clock = UserClock(trace)
    columns: list[NDArray[Any]] = [clock.within(-int(w * HOUR_MS), 0) for w in WINDOWS_HOURS]
    columns += [clock.within(-days * DAY_MS, -days * DAY_MS + hours * HOUR_MS) for days, hours in ECHOES]
    times = trace.times_ms
    local_ms = times + trace.zone_ms
    columns += [(local_ms % DAY_MS) / HOUR_MS, (local_ms // DAY_MS) % 7, trace.surfaces]
    columns += _gaps(trace)
    columns += _sequences(trace)
    table = np.stack([np.asarray(column, dtype=np.float32) for column in columns], axis=1)
    return np.concatenate([table, trace.profiles[trace.users]], axis=1)


def _gaps(trace: Trace) -> list[NDArray[np.float32]]:
    """The last gaps between the user's requests in hours, and the surfaces and outcomes of the last requests."""
    columns = []
    at, reach = np.arange(len(trace)), trace.previous
    for step in range(NUM_GAPS):
        known = (at != NONE) & (reach != NONE)
        columns.append(np.where(known, trace.times_ms[at] - trace.times_ms[reach], np.nan) / HOUR_MS)
        if step < 3:
            columns.append(np.where(known, trace.surfaces[reach], np.nan))
            # the outcome of the request itself is not known yet
            columns.append(np.where(known, trace.outcomes[reach], np.nan))
        at, reach = reach, np.where(known, trace.previous[reach], NONE)
    return [column.astype(np.float32) for column in columns]


def _sequences(trace: Trace) -> list[NDArray[np.float32]]:
    """Per user, over all his requests so far: sessions, active days, share of gaps under a day, time since the first, surfaces."""
    order, previous = trace.by_user, trace.previous
    times, users = trace.times_ms, trace.users
    gap = np.where(previous != NONE, times - times[previous], np.int64(10**12))
    local_day = (times + trace.zone_ms) // DAY_MS
    new_day = (previous == NONE) | (local_day != local_day[previous])
    new_session = gap > SESSION_MS
    starts = np.searchsorted(users[order], np.arange(int(users.max(initial=0)) + 1))

    def running(values: NDArray[np.generic]) -> NDArray[np.float32]:
        total = np.cumsum(values[order], dtype=np.float64)
        base = np.concatenate([[0.0], total])[starts][users[order]]
        result = np.empty(len(order), dtype=np.float32)
        result[order] = total - base
        return result

    count = running(np.ones(len(order)))
    first = times[order][starts][users]
    session_start = np.where(new_session, times, 0)
    session_start[order] = np.maximum.accumulate(session_start[order] + users[order].astype(np.int64) * 10**14) % 10**14
    same_surface = running((previous != NONE) & (trace.surfaces == trace.surfaces[previous]))
    hour = (times + trace.zone_ms) % DAY_MS / DAY_MS * 2 * np.pi
    past_outcomes = running(trace.outcomes) - trace.outcomes
    return [
        count,
        running(new_session),
        running(new_day),
        running(gap < DAY_MS) / count,
        running(gap < 3 * HOUR_MS) / count,
        running(np.minimum(gap, 4 * DAY_MS) * (previous != NONE)) / np.maximum(count - 1, 1) / HOUR_MS,
        (times - first) / HOUR_MS,
        (times - session_start) / HOUR_MS,
        count / np.maximum((times - first) / DAY_MS, 0.25),
        same_surface / count,
        running(np.cos(hour)) / count,
        running(np.sin(hour)) / count,
        past_outcomes / np.maximum(count - 1, 1),
    ]


def expected_returns(
    trace: Trace, ttl_ms: int, fits_ms: list[int], *, table: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Expected requests of the user within each horizon after each request, by models that know only what came before their fit.

    Args:
        trace: the requests.
        ttl_ms: the last horizon.
        fits_ms: moments of the fits, rising; each serves until the next; zeros before the first.
        table: `features(trace)`, where it was computed already.

    Returns:
        f4[R, H], non-decreasing in H.
    """
    table = features(trace) if table is None else table
    labels = true_returns(trace, ttl_ms)
    columns = [
        predict_counts(trace, table, labels[:, h], horizon, fits_ms, cap=MAX_LABEL, seed=h)
        for h, horizon in enumerate(horizons(ttl_ms).tolist())
    ]
    return np.maximum.accumulate(np.stack(columns, axis=1), axis=1)


def predict_counts(
    trace: Trace,
    table: NDArray[np.float32],
    label: NDArray[np.float32],
    horizon_ms: int,
    fits_ms: list[int],
    *,
    cap: float,
    seed: int,
) -> NDArray[np.float32]:
    """Expected counts of what follows each request within a horizon, by Poisson boosting on its features.

    Args:
        trace: the requests.
        table: f4[R, F]; features of each.
        label: f4[R]; what really followed; read only where the horizon has passed by the time of a fit.
        horizon_ms: of the label.
        fits_ms: moments of the fits, rising; each serves until the next; zeros before the first.
        cap: labels are cut here.
        seed: of the models.

    Returns:
        f4[R].
    """
    result = np.zeros(len(trace), dtype=np.float32)
    for fit_ms, end_ms in zip(fits_ms, [*fits_ms[1:], int(trace.times_ms[-1]) + 1], strict=True):
        serve = slice(*np.searchsorted(trace.times_ms, [fit_ms, end_ms]))
        known = int(np.searchsorted(trace.times_ms, fit_ms - horizon_ms))
        if serve.stop <= serve.start:
            continue
        if known < LEAST_FIT or not label[:known].any():
            result[serve] = label[:known].mean() if known else 0.0
            continue
        model = _model(seed)
        model.fit(table[:known], np.minimum(label[:known], cap))
        result[serve] = model.predict(table[serve])
    return result


def counts_in_hindsight(
    trace: Trace,
    table: NDArray[np.float32],
    label: NDArray[np.float32],
    since_ms: int,
    until_ms: int,
    *,
    cap: float,
    seed: int,
) -> NDArray[np.float32]:
    """A bound for `predict_counts`: what its models foresee if they may learn from the very days that they serve, of other users.

    Args:
        trace, table, label, cap, seed: as there; the seed is also that of the folds.
        since_ms, until_ms: requests between them are learned from, each by the models of users in other folds than its own.

    Returns:
        f4[R]; zeros where there was too little to learn from.
    """
    rng = np.random.default_rng(seed)
    fold = rng.integers(0, FOLDS, int(trace.users.max(initial=0)) + 1)[trace.users]
    known = (trace.times_ms >= since_ms) & (trace.times_ms < until_ms)
    result = np.zeros(len(trace), dtype=np.float32)
    for number in range(FOLDS):
        others, own = known & (fold != number), fold == number
        if np.count_nonzero(others) < LEAST_FIT or not label[others].any():
            continue
        model = _model(seed)
        model.fit(table[others], np.minimum(label[others], cap))
        result[own] = model.predict(table[own])
    return result


def _model(seed: int) -> HistGradientBoostingRegressor:
    # small trees: returns are noisy, larger ones were worse on later days
    return HistGradientBoostingRegressor(
        loss="poisson",
        learning_rate=0.06,
        max_iter=100,
        max_leaf_nodes=8,
        min_samples_leaf=80,
        l2_regularization=5.0,
        max_features=0.3,
        early_stopping=False,
        random_state=seed,
    )
