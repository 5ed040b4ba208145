"""Measures of a simulated policy, with intervals over users.

All of them count requests of the report only. Shapes: R requests, U users.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solaris.simulate import Result, Setting
from solaris.simulate_oracle import triggers
from solaris.trace import NONE, Trace

NUM_RESAMPLES = 500
# Share of the FM's NE gain that a small ranker keeps on an ad with a pair embedding, and on one with only the mean of the FM's embeddings
# of the user's past impressions: .80 and .35, measured on this log with a student scored day by day (data set's notes, "Transfer").
PAIR_GAIN, USER_GAIN = 0.80, 0.35
# f_R over f_C of the default GEM (history of 50 events: 1.495 and 0.129 MFLOPs), as `gem.engine.GemEngine.flops` counts them
REQUEST_PAIRS = 11.6


LEAST_GAP = 1e-3  # coverage; below this a share of the gap says nothing


@dataclass(frozen=True)
class Interval:
    """A measure and its 95 % interval over users."""

    value: float
    low: float
    high: float


class Measures:
    """Measures of results on one trace.

    Args:
        trace: the requests.
        request_pairs: cost of f_R in pairs, for the share of synchronous FLOPs.
    """

    def __init__(self, trace: Trace, request_pairs: float = REQUEST_PAIRS, *, seed: int = 0) -> None:
        self._trace, self._request_pairs = trace, request_pairs
        self._report = trace.times_ms >= trace.report_ms
        self._users = trace.users[self._report]
        self._num_users = int(trace.users.max(initial=NONE)) + 1
        self.asked = float(self._report.sum() * trace.num_candidates)
        self._shown = np.bincount(trace.shown_request, minlength=len(trace)).astype(np.float64)
        active = np.unique(self._users)
        rng = np.random.default_rng(seed)
        draws = rng.multinomial(len(active), np.full(len(active), 1 / max(len(active), 1)), NUM_RESAMPLES)
        self._weights = np.zeros((NUM_RESAMPLES, self._num_users), dtype=np.float32)
        self._weights[:, active] = draws

    def coverage(self, result: Result) -> float:
        """H: share of the requested pairs that had a readable row."""
        return self._sum(result.hits) / self.asked

    def shown_coverage(self, result: Result) -> float:
        """Share of the ads really shown that had a readable pair row."""
        return self._sum(result.shown_hits) / self._sum(self._shown)

    def user_coverage(self, result: Result) -> float:
        """Share of requests that found any readable row of their user, so that the user level at least is there."""
        return self._sum(result.user_rows) / max(int(self._report.sum()), 1)

    def spend(self, result: Result) -> float:
        """Inferences per requested pair."""
        return self._sum(result.computed) / self.asked

    def pair_yield(self, result: Result) -> float | None:
        """Hits per inference; None where nothing was computed."""
        computed = self._sum(result.computed)
        return self._sum(result.hits) / computed if computed else None

    @staticmethod
    def useful_share(result: Result) -> float | None:
        """Share of the rows computed in the report that were read at least once; None where none was."""
        return float(result.useful / result.rows) if result.rows else None

    def flops_share(self, result: Result) -> float:
        """Asynchronous FLOPs over those of an FM that answers every request synchronously: f_R only for users whose pairs are run."""
        spent = self._sum(result.runs) * self._request_pairs + self._sum(result.computed)
        return float(spent / (self._report.sum() * self._request_pairs + self.asked))

    def hierarchy_flops_share(self, result: Result) -> float:
        """The same with f_R after every request, so that the user level is as good under every policy."""
        requests = self._report.sum() * self._request_pairs
        return float((requests + self._sum(result.computed)) / (requests + self.asked))

    def ne_kept(self, result: Result, user_rows: NDArray[np.float64]) -> float:
        """Share of the pair-level NE gain that the whole hierarchy keeps on the ads shown: a model, not a measurement.

        The gain is taken as additive over shown ads by the level they were served at: 1 with a pair row, `USER_GAIN / PAIR_GAIN` with
        only the user level, 0 with none.

        Args:
            result: of a policy.
            user_rows: f8[R]; 1 where the user level was there, f_R having been run after every request.
        """
        user_only = np.maximum(user_rows * self._shown - result.shown_hits, 0)
        kept = self._sum(result.shown_hits) + self._sum(user_only) * USER_GAIN / PAIR_GAIN
        return kept / self._sum(self._shown)

    def coverage_interval(self, result: Result) -> Interval:
        """Coverage with its interval over users."""
        hits, asked = self._resampled(result.hits), self._resampled(np.ones(len(self._trace)))
        return _interval(self.coverage(result), hits / (asked * self._trace.num_candidates))

    def gap_closed(self, result: Result, reactive: Result, oracle: Result) -> Interval | None:
        """(H - H reactive) / (H oracle - H reactive), users resampled together; None where there is no gap to close."""
        if self.coverage(oracle) - self.coverage(reactive) < LEAST_GAP:
            return None
        mine, low, high = (self._resampled(r.hits) for r in (result, reactive, oracle))
        point = (self.coverage(result) - self.coverage(reactive)) / (self.coverage(oracle) - self.coverage(reactive))
        return _interval(point, (mine - low) / np.maximum(high - low, 1e-9))

    def row(self, result: Result, user_rows: NDArray[np.float64]) -> dict[str, float | str | None]:
        """All measures of a result, flat; `user_rows` as in `ne_kept`."""
        interval = self.coverage_interval(result)
        quantiles = {f"age_p{int(q * 100)}_h": _hours(result.age_quantile(q)) for q in (0.5, 0.95)}
        return {
            "policy": result.policy,
            "coverage": interval.value,
            "coverage_low": interval.low,
            "coverage_high": interval.high,
            "shown_coverage": self.shown_coverage(result),
            "user_coverage": self.user_coverage(result),
            "useful_share": self.useful_share(result),
            "yield": self.pair_yield(result),
            "spend": self.spend(result),
            "flops_share": self.flops_share(result),
            "hierarchy_flops_share": self.hierarchy_flops_share(result),
            "ne_kept": self.ne_kept(result, user_rows),
            **quantiles,
        }

    def _sum(self, per_request: NDArray[np.float64]) -> float:
        return float(per_request[self._report].sum())

    def _resampled(self, per_request: NDArray[np.float64]) -> NDArray[np.float64]:
        per_user = np.bincount(self._users, per_request[self._report], minlength=self._num_users)
        return np.asarray(self._weights @ per_user, dtype=np.float64)


def user_embedding_only(trace: Trace, setting: Setting) -> Result:
    """f_R after every request and no pair: coverage exists at the user level only, by definition."""
    result = Result.empty("user_embedding", trace)
    trigger = triggers(trace, setting.lag_ms)
    fresh = (trigger != NONE) & (trace.times_ms - trace.times_ms[trigger] <= setting.ttl_ms)
    kept = trace.times_ms >= setting.start_ms
    result.user_rows = (fresh & kept).astype(np.float64)
    result.runs = kept.astype(np.float64)
    return result


def _interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _hours(ms: float | None) -> float | None:
    return None if ms is None else ms / 3_600_000
