"""How often a really shown ad had a fresh pair row, when the K likeliest pairs of a user are computed at each of his returns.

This asks more than pair coverage: ads must be found among all, not only kept. They are ranked by `solaris.policy_shown`. Two readings:
`at_return`, the pairs are those foreseen for the request itself from what was known before it, as if computed in time (what recall
measures); `speculated`, they were foreseen and computed when an earlier request of the user had been answered, and lived until then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solaris.policy_shown import Foreseen
from solaris.simulate import LAG_MS, NEVER_MS, Setting
from solaris.simulate_measures import user_embedding_only
from solaris.trace import DAY_MS, Trace


def shown_against_pairs(
    trace: Trace, foreseen: Foreseen, sizes: tuple[int, ...], ttl_ms: int = DAY_MS
) -> dict[str, dict[str, float]]:
    """Per K: shares of the report's shown ads that were found, and pairs computed per hit.

    Args:
        trace: the requests.
        foreseen: at least from one TTL before the report on, with as many ads as the largest of `sizes`.
        sizes: K.
        ttl_ms: of the rows.

    Returns:
        K -> `at_return` and its `pairs_per_hit`; `speculated`, the same of `returns` within the TTL only, and `speculated_pairs_per_hit`
        with pairs that still have a live row not computed again.
    """
    shown_ads = trace.candidates[trace.shown_request, trace.shown_position]
    reported = trace.times_ms >= trace.report_ms
    in_report = reported[trace.shown_request]
    total, num_requests = int(in_report.sum()), int(reported.sum())
    ranks = foreseen.ranks[in_report[foreseen.shown]]
    setting = Setting(1.0, ttl_ms, trace.report_ms - ttl_ms)
    returned = user_embedding_only(trace, setting).user_rows[trace.shown_request[in_report]].sum()
    result = {}
    for k in sizes:
        found = int((ranks < k).sum())
        hits, computed = _speculated(trace, foreseen, shown_ads, k, ttl_ms)
        result[str(k)] = {
            "at_return": found / total,
            "pairs_per_hit": k * num_requests / max(found, 1),
            "speculated": hits / total,
            "speculated_of_returns": hits / max(returned, 1),
            "speculated_pairs_per_hit": computed / max(hits, 1),
        }
    return result


def _speculated(
    trace: Trace, foreseen: Foreseen, shown_ads: NDArray[np.int16], num: int, ttl_ms: int
) -> tuple[int, int]:
    """(shown ads of the report that had a readable row, rows computed in the report) with the `num` best computed after every request."""
    order = np.argsort(trace.shown_request, kind="stable")
    cuts = np.searchsorted(trace.shown_request[order], np.arange(len(trace) + 1))
    first = int(np.searchsorted(trace.times_ms, trace.report_ms - ttl_ms))
    made = np.full(trace.num_ads, NEVER_MS, dtype=np.int64)
    hits = computed = 0
    before = -1
    for request in trace.by_user[trace.by_user >= first].tolist():
        user, now = int(trace.users[request]), int(trace.times_ms[request])
        if user != before:
            made[:], before = NEVER_MS, user
        age = now - made[shown_ads[order[cuts[request] : cuts[request + 1]]]]
        ads = foreseen.ads[request - foreseen.first, :num]
        fresh = ads[now - made[ads] > ttl_ms]
        made[fresh] = now
        if now >= trace.report_ms:
            hits += int(np.count_nonzero((age >= LAG_MS) & (age <= ttl_ms)))
            computed += len(fresh)
    return hits, computed
