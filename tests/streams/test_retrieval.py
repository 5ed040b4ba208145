from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gem.examples import RequestLog
from streams.dataset import Dataset
from streams.retrieval import HOUR_MS, CausalRetrieval

NUM = 40


@pytest.fixture(scope="module")
def chosen(log: RequestLog, dataset: Dataset) -> np.ndarray:
    return log.between(dataset.schema.split_ms()[1], None)[:400]


def fill(retrieval: CausalRetrieval, log: RequestLog, requests: np.ndarray, *, shown: bool) -> np.ndarray:
    ads = [log.ads[log.offsets[r] : log.offsets[r + 1]] if shown else log.ads[:0] for r in requests]
    return retrieval.fill(log.users[requests], log.surfaces[requests], log.times_ms[requests], ads, NUM)


def test_slates_are_distinct_ads_with_those_really_shown(log: RequestLog, dataset: Dataset, chosen: np.ndarray) -> None:
    slates = fill(CausalRetrieval(dataset, int(log.times_ms[chosen[0]])), log, chosen, shown=True)
    assert slates.shape == (len(chosen), NUM)
    for row, request in zip(slates, chosen, strict=True):
        assert len(set(row.tolist())) == NUM
        assert set(log.ads[log.offsets[request] : log.offsets[request + 1]].tolist()) <= set(row.tolist())


def test_the_future_changes_no_slate(log: RequestLog, dataset: Dataset, chosen: np.ndarray) -> None:
    start = int(log.times_ms[chosen[0]])
    last_hour = int(log.times_ms[chosen[-1]]) // HOUR_MS * HOUR_MS
    rows = dataset.rows.copy()
    later = rows["time_ms"] >= last_hour
    rows["ad"][later] = rows["ad"][later][::-1]
    rows["surface"][later] = 0
    changed = replace(dataset, rows=rows)
    one, two = (fill(CausalRetrieval(d, start), log, chosen, shown=False) for d in (dataset, changed))
    assert np.array_equal(one, two)
    rows = dataset.rows.copy()
    earlier = (rows["time_ms"] < last_hour) & (rows["time_ms"] >= start)
    rows["ad"][earlier] = rows["ad"][0]
    three = fill(CausalRetrieval(replace(dataset, rows=rows), start), log, chosen, shown=False)
    assert not np.array_equal(one, three), "what came earlier must matter"


def test_slates_recur_and_beat_chance(log: RequestLog, dataset: Dataset, chosen: np.ndarray) -> None:
    slates = fill(CausalRetrieval(dataset, int(log.times_ms[chosen[0]])), log, chosen, shown=False)
    hits = np.mean([log.ads[log.offsets[r]] in slate for r, slate in zip(chosen, slates, strict=True)])
    assert hits > 3 * NUM / len(dataset.raw_ads)


def test_what_would_see_the_future_is_refused(log: RequestLog, dataset: Dataset, chosen: np.ndarray) -> None:
    retrieval = CausalRetrieval(dataset, int(log.times_ms[chosen[0]]))
    with pytest.raises(ValueError, match="lies before"):
        fill(retrieval, log, chosen - 50, shown=False)
    with pytest.raises(ValueError, match="candidates asked of"):
        retrieval.fill(
            log.users[chosen], log.surfaces[chosen], log.times_ms[chosen], [log.ads[:0]] * len(chosen), 10**6
        )
