"""All policies of B5 on one trace: what is learned once, and one run per policy, budget and TTL."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from solaris.policies import (
    Listed,
    Nothing,
    PopularAds,
    ReactiveFill,
    Table,
    TtlRefresh,
    frequency_values,
    numbered,
    random_order,
    user_frequency_values,
)
from solaris.policy_reuse import reuse_probability
from solaris.policy_shown import Foreseen, foresee
from solaris.policy_value import PairFeatures, ValueModel, tails, true_uses
from solaris.returns import features, true_returns
from solaris.simulate import Policy, Result, Setting, simulate
from solaris.simulate_measures import Measures, user_embedding_only
from solaris.simulate_oracle import Oracle
from solaris.trace import DAY_MS, HOUR_MS, Trace

Row = dict[str, object]
VALUE, REACTIVE, FREQUENCY, GREEDY = "expected_value", "reactive", "user_frequency", "oracle_greedy"
HINDSIGHT = "levels_in_hindsight"
PAIR_FREQUENCY, SHOWN, SHOWN_KNOWN = "pair_frequency", "expected_shown", "shown_returns_known"
MAIN = (REACTIVE, "reactive_ranked", FREQUENCY, PAIR_FREQUENCY, VALUE, GREEDY)
WARM_UP_MS = DAY_MS // 2  # before the rows that the report reads: the price finds its level
NUM_FORESEEN = 1_000  # ads listed for a user; the largest K of the recall table
KNOWN_TTL_MS = DAY_MS  # further bounds are run under the TTL of the headline only
NUM_PROPOSED = 600  # of these the policy considers; with 1,000 it covered as much


def start_of(trace: Trace, ttl_ms: int) -> int:
    """Start of the replays under a TTL: a row read at the start of the report was computed under the policy."""
    return trace.report_ms - ttl_ms - WARM_UP_MS


@dataclass(frozen=True)
class Shared:
    """What does not depend on the TTL."""

    trace: Trace
    table: NDArray[np.float32]
    frequency: NDArray[np.float32]
    foreseen: Foreseen | None
    foreseen_pairs: NDArray[np.int32] | None

    @classmethod
    def of(cls, trace: Trace, ttls_ms: Sequence[int] = ()) -> Shared:
        """Computes the features of all requests, and with `ttls_ms` the ads foreseen from the earliest start of their replays on."""
        foreseen, pairs = None, None
        if ttls_ms:
            foreseen = foresee(trace, start_of(trace, max(ttls_ms)), min(NUM_FORESEEN, trace.num_ads))
            pairs = numbered(trace, foreseen.first, foreseen.ads[:, :NUM_PROPOSED])
            log(f"{trace.name}: shown ads foreseen")
        return cls(trace, features(trace), frequency_values(trace), foreseen, pairs)


class Comparison:
    """All policies on one trace under one TTL."""

    def __init__(self, shared: Shared, ttl_ms: int, *, only: tuple[str, ...] | None = None) -> None:
        trace = shared.trace
        self.trace, self.ttl_ms, self.measures = trace, ttl_ms, Measures(trace)
        self.start_ms = start_of(trace, ttl_ms)
        self._policies = {
            name: make for name, make in self._makers(shared, only).items() if only is None or name in only
        }
        setting = Setting(1.0, ttl_ms, self.start_ms)
        self._bounds = [Oracle(trace, setting, any_moment=any_moment) for any_moment in (False, True) if not only]

    def run(self, budget: float) -> list[Result]:
        """One result per policy and bound."""
        setting = Setting(budget, self.ttl_ms, self.start_ms)
        results = []
        for name, make in self._policies.items():
            began = time.time()
            results.append(simulate(self.trace, make(), setting))
            log(
                f"{self.trace.name} TTL {self.ttl_ms / HOUR_MS:.0f} h budget {budget}: {name} ({time.time() - began:.0f} s)"
            )
        results.append(user_embedding_only(self.trace, setting))
        return results + [bound.at(budget) for bound in self._bounds]

    def rows(self, budget: float) -> list[Row]:
        """Measures of every policy, with the share of the gap that it closes."""
        results = self.run(budget)
        named = {result.policy: result for result in results}
        measures, rows = self.measures, []
        for result in results:
            row: Row = {"trace": self.trace.name, "ttl_h": self.ttl_ms / HOUR_MS, "budget": budget}
            row |= measures.row(result, named["user_embedding"].user_rows)
            for key, low, high in (
                ("gap_closed", REACTIVE, GREEDY),
                ("gap_closed_ranked", "reactive_ranked", GREEDY),
                ("gap_closed_exact", REACTIVE, "oracle"),
            ):
                closed = measures.gap_closed(result, named[low], named[high]) if high in named else None
                row |= {
                    key: closed and closed.value,
                    f"{key}_low": closed and closed.low,
                    f"{key}_high": closed and closed.high,
                }
            rows.append(row)
        return rows

    def _makers(self, shared: Shared, only: tuple[str, ...] | None) -> dict[str, Callable[[], Policy]]:
        trace, ttl_ms = self.trace, self.ttl_ms
        pair_features = PairFeatures(trace, shared.frequency)
        uses = true_uses(trace, ttl_ms)
        model = ValueModel(trace, ttl_ms, shared.table, pair_features, uses)
        fits = [self.start_ms, trace.report_ms]
        value, returns = model.predict(fits)
        log(f"{trace.name} TTL {ttl_ms / HOUR_MS:.0f} h: models fitted")
        known = true_returns(trace, ttl_ms)[:, -1:]
        expected = np.maximum(returns[:, -1:], 1e-3)
        reuse = reuse_probability(trace, ttl_ms, pair_features, uses, fits) if only is None else value
        tail = tails(returns)
        makers: dict[str, Callable[[], Policy]] = {
            "nothing": Nothing,
            REACTIVE: lambda: Table(REACTIVE, random_order(trace), None, ttl_ms, priced=False),
            "reactive_ranked": lambda: ReactiveFill(trace),
            "ttl_refresh": lambda: TtlRefresh(trace, ttl_ms),
            "user_x_popular": lambda: PopularAds(trace),
            FREQUENCY: lambda: Table(FREQUENCY, user_frequency_values(trace), None, ttl_ms),
            PAIR_FREQUENCY: lambda: Table(PAIR_FREQUENCY, shared.frequency, None, ttl_ms),
            "logistic_reuse": lambda: Table("logistic_reuse", reuse, None, ttl_ms),
            VALUE: lambda: Table(VALUE, value, tail, ttl_ms, caution=2.0),
            "returns_known": lambda: Table("returns_known", value / expected * known, None, ttl_ms),
            "candidates_known": lambda: Table(
                "candidates_known", (expected * uses / np.maximum(known, 1)).astype(np.float32), None, ttl_ms
            ),
            GREEDY: lambda: Table(GREEDY, uses.astype(np.float32), None, ttl_ms),
        }
        if ttl_ms == KNOWN_TTL_MS:
            hindsight = cache(lambda: model.in_hindsight(value))
            makers[HINDSIGHT] = lambda: Table(HINDSIGHT, hindsight(), tail, ttl_ms, caution=2.0)
        if shared.foreseen is not None and shared.foreseen_pairs is not None:
            first, chances, pairs = shared.foreseen.first, shared.foreseen.chances, shared.foreseen_pairs

            def shown(name: str, returns: NDArray[np.float32]) -> Policy:
                # chance that the user is shown the ad within the TTL
                values = -np.expm1(-returns[first:] * chances[:, : pairs.shape[1]])
                return Listed(name, first, pairs, values, tail, ttl_ms, caution=2.0)

            makers[SHOWN] = lambda: shown(SHOWN, returns[:, -1:])
            if ttl_ms == KNOWN_TTL_MS:
                makers[SHOWN_KNOWN] = lambda: shown(SHOWN_KNOWN, known)
        return makers


def log(line: str) -> None:
    """Progress goes to the error stream: the last line of the output is the JSON object."""
    print(line, file=sys.stderr, flush=True)
