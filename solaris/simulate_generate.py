"""A generated trace with stated reuse: synthetic, for what the real one cannot show (known reuse, dense users, ad churn).

Users come in sessions (Poisson, each user at his own rate, times a rhythm of the day); within a session requests follow one another in
geometric number. A user's candidate set is a memory: from one of his requests to the next, a candidate survives with probability
`keep_core` (the first third of the ranks) or `keep_rest`, times exp(-gap / `memory_ms`); dead ads never survive. The places that fall
free are filled from the ads alive, by popularity. So the reuse of each candidate is known exactly (`reuse_probability`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solaris.trace import DAY_MS, HOUR_MS, Trace

START_MS = 1_700_006_400_000
MINUTE_MS = 60_000


@dataclass(frozen=True)
class Generator:
    """What a generated trace is drawn from.

    Attributes:
        num_users, num_ads, num_candidates, num_days: sizes.
        sessions_per_day: mean over users; a user's own rate is gamma distributed with shape `rate_shape`.
        requests_per_session: mean.
        keep_core, keep_rest: a candidate survives to the user's next request with this probability, before the decay with the gap.
        memory_ms: of that decay.
        ad_life_ms: mean life of an ad; ads are born at an even pace.
        report_days: the last days, on which measures count.
    """

    num_users: int = 1_500
    num_ads: int = 4_000
    num_candidates: int = 60
    num_days: int = 14
    sessions_per_day: float = 1.2
    rate_shape: float = 0.35
    requests_per_session: float = 1.8
    keep_core: float = 0.95
    keep_rest: float = 0.2
    memory_ms: float = 2 * DAY_MS
    ad_life_ms: float = 6 * DAY_MS
    report_days: int = 5

    def reuse_probability(self, rank: NDArray[np.int64], gap_ms: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(a candidate at this rank survives to the user's next request | its gap), its ad staying alive."""
        keep = np.where(rank < self.num_candidates // 3, self.keep_core, self.keep_rest)
        return keep * np.exp(-gap_ms / self.memory_ms)


def generated_trace(seed: int = 0, generator: Generator | None = None) -> Trace:
    """Draws a trace."""
    g = generator or Generator()
    rng = np.random.default_rng(seed)
    users, times = _arrivals(rng, g)
    born = np.sort(rng.uniform(-2 * g.ad_life_ms, g.num_days * DAY_MS, g.num_ads))
    dies = born + rng.exponential(g.ad_life_ms, g.num_ads)
    popularity = rng.pareto(1.1, g.num_ads) + 0.1
    candidates = np.empty((len(users), g.num_candidates), dtype=np.int16)
    last: dict[int, int] = {}
    ranks = np.arange(g.num_candidates)
    alive, chances, hour = np.zeros(0, dtype=np.int64), np.zeros(0), -1
    for r, (user, now) in enumerate(zip(users.tolist(), times.tolist(), strict=True)):
        if now // HOUR_MS != hour:
            hour = now // HOUR_MS
            alive = np.flatnonzero((born <= now) & (dies > now))
            chances = np.log(popularity[alive])
        before = last.get(user)
        old = kept = np.zeros(0, dtype=np.int16)
        if before is not None:
            old = candidates[before]
            gap = np.full(len(ranks), float(now - times[before]))
            survives = rng.random(len(ranks)) < g.reuse_probability(ranks, gap)
            kept = old[survives & (dies[old] > now)]
        # draws without replacement by popularity: the largest of log weight + Gumbel noise
        fresh = alive[np.argsort(-(chances + rng.gumbel(size=len(alive))))[: g.num_candidates * 2]]
        # what has just left does not come back by chance, so that the stated reuse is exact
        fresh = fresh[~np.isin(fresh, old)][: g.num_candidates - len(kept)]
        candidates[r] = np.concatenate([kept, fresh])
        last[user] = r
    shown = np.minimum(rng.geometric(0.1, len(users)) - 1, g.num_candidates - 1)
    return Trace(
        name="generated",
        users=users.astype(np.int32),
        times_ms=START_MS + times,
        surfaces=np.zeros(len(users), dtype=np.int16),
        candidates=candidates,
        shown_request=np.arange(len(users), dtype=np.int32),
        shown_position=shown.astype(np.int16),
        outcomes=np.zeros(len(users), dtype=np.float32),
        profiles=np.zeros((g.num_users, 0), dtype=np.float32),
        num_ads=g.num_ads,
        report_ms=START_MS + (g.num_days - g.report_days) * DAY_MS,
    )


def _arrivals(rng: np.random.Generator, g: Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(users i8[R], times in ms from the start i8[R]) in order of time."""
    rates = g.sessions_per_day * rng.gamma(g.rate_shape, 1 / g.rate_shape, g.num_users)
    sessions = rng.poisson(rates * g.num_days)
    owner = np.repeat(np.arange(g.num_users), sessions)
    # each user has his own hour; most sessions lie around it
    favourite = rng.uniform(0, 24, g.num_users)[owner]
    hour = (favourite + rng.normal(0, 4, len(owner))) % 24
    start = (rng.integers(0, g.num_days, len(owner)) * 24 + hour) * HOUR_MS
    length = rng.geometric(1 / g.requests_per_session, len(owner))
    first = np.cumsum(length) - length
    gaps = rng.exponential(3 * MINUTE_MS, int(length.sum()))
    gaps[first] = 0
    elapsed = np.cumsum(gaps)
    times = np.repeat(start - elapsed[first], length) + elapsed
    users = np.repeat(owner, length)
    kept = times < g.num_days * DAY_MS
    order = np.argsort(times[kept], kind="stable")
    return users[kept][order], times[kept][order].astype(np.int64)
