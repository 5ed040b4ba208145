"""How often a really shown ad had a fresh pair row, when the K best pairs of a user are computed at each of his requests.

This asks more than pair coverage: ads must be found, not only kept. Ads are ranked for the user by the causal retrieval (popularity of
the hours before on his surface, affinity), those that he was shown already left out: they come again in .9 % of cases. Two readings:
`at_return`, the pairs are those of the request itself, as if computed in time (what recall measures); `speculated`,
they were computed after an earlier request of the user, on that request's surface, and lived until then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gem.examples import RequestLog
from solaris.simulate import LAG_MS
from solaris.trace import DAY_MS, KUAIRAND_REPORT_MS, KUAIRAND_SVD_UNTIL_MS
from streams.dataset import load_dataset
from streams.retrieval import CausalRetrieval

PART = 8_000  # requests ranked at once
SPARE = 100  # ads ranked beyond the largest K, in place of those shown already


def shown_against_pairs(
    sizes: tuple[int, ...], ttl_ms: int = DAY_MS, folder: str = "data/kuairand"
) -> dict[str, dict[str, float]]:
    """Per K: shares of the report's shown ads that were found, and pairs computed per hit.

    Returns:
        K -> `at_return` and its `pairs_per_hit`; `speculated`, the same of `returns` within the TTL only, and `speculated_pairs_per_hit`
        with pairs that still have a live row not computed again.
    """
    dataset = load_dataset(folder)
    log = RequestLog.of(dataset)
    requests = log.between(KUAIRAND_REPORT_MS - ttl_ms, None)
    ads = np.sort(np.fromiter(dataset.raw_ads, dtype=np.uint64, count=len(dataset.raw_ads)))
    retrieval = CausalRetrieval(dataset, KUAIRAND_SVD_UNTIL_MS)
    seen: dict[int, set[int]] = {}
    for r in range(int(requests[0])):
        seen.setdefault(int(log.users[r]), set()).update(_shown(log, r).tolist())
    found = {k: np.zeros(2) for k in sizes}
    computed = dict.fromkeys(sizes, 0)
    total, returns, asked = 0, 0, 0
    # per user and K: (moment, ads computed) within the TTL; per user: moments of his requests
    rows: dict[tuple[int, int], list[tuple[int, NDArray[np.uint64]]]] = {}
    moments: dict[int, list[int]] = {}
    for start in range(0, len(requests), PART):
        part = requests[start : start + PART]
        empty = [ads[:0]] * len(part)
        ranked = retrieval.fill(log.users[part], log.surfaces[part], log.times_ms[part], empty, max(sizes) + SPARE)
        for r, best in zip(part.tolist(), ranked, strict=True):
            user, now = int(log.users[r]), int(log.times_ms[r])
            mine, shown = seen.setdefault(user, set()), _shown(log, r)
            order = best[~np.isin(best, np.fromiter(mine, np.uint64, len(mine)))]
            reported = now >= KUAIRAND_REPORT_MS
            known = any(LAG_MS <= now - then <= ttl_ms for then in moments.get(user, ()))
            total, returns, asked = (
                total + len(shown) * reported,
                returns + len(shown) * known * reported,
                asked + reported,
            )
            for k in sizes:
                live = [(then, made) for then, made in rows.get((user, k), ()) if now - then <= ttl_ms]
                ready = np.concatenate([ads[:0], *(made for then, made in live if now - then >= LAG_MS)])
                fresh = np.setdiff1d(order[:k], np.concatenate([ads[:0], *(made for _, made in live)]))
                if reported:
                    found[k] += np.isin(shown, order[:k]).sum(), np.isin(shown, ready).sum()
                    computed[k] += len(fresh)
                rows[user, k] = [*live, (now, fresh)]
            moments[user] = [*moments.get(user, ())[-20:], now]
            mine.update(shown.tolist())
    return {
        str(k): {
            "at_return": found[k][0] / total,
            "pairs_per_hit": k * asked / max(found[k][0], 1),
            "speculated": found[k][1] / total,
            "speculated_of_returns": found[k][1] / max(returns, 1),
            "speculated_pairs_per_hit": computed[k] / max(found[k][1], 1),
        }
        for k in sizes
    }


def _shown(log: RequestLog, request: int) -> NDArray[np.uint64]:
    return log.ads[log.offsets[request] : log.offsets[request + 1]]
