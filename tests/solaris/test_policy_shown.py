"""Forecasts of shown ads and the policy that proposes ads of all: causality, budget, what it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.speculation.recall import shown_against_pairs
from solaris.policies import Listed, numbered
from solaris.policy_shown import Foreseen, foresee
from solaris.simulate import Moment, simulate
from solaris.simulate_generate import Generator, generated_trace
from solaris.trace import DAY_MS, HOUR_MS, Trace
from tests.solaris.test_simulate import setting_of, trace_of

GENERATOR = Generator(num_users=80, num_ads=200, num_candidates=12, num_days=8, report_days=3, sessions_per_day=2.0)
NUM = 40


@pytest.fixture(scope="module")
def generated() -> Trace:
    return generated_trace(2, GENERATOR)


@pytest.fixture(scope="module")
def foreseen(generated: Trace) -> Foreseen:
    return foresee(generated, start_of(generated), NUM, epochs=2)


def start_of(trace: Trace) -> int:
    return trace.report_ms - DAY_MS


def listed(trace: Trace, foreseen: Foreseen) -> Listed:
    tail = np.linspace(1, 0, 13, dtype=np.float32)[None].repeat(len(trace), 0)
    pairs = numbered(trace, foreseen.first, foreseen.ads)
    return Listed("listed", foreseen.first, pairs, foreseen.chances, tail, DAY_MS)


def test_nothing_after_an_hour_changes_a_forecast_in_it(generated: Trace, foreseen: Foreseen) -> None:
    """Other users, other slates and other shown ads from a request on: forecasts up to its hour stay, to the bit."""
    cut = int(np.searchsorted(generated.times_ms, generated.report_ms))
    changed = replace(
        generated,
        candidates=generated.candidates.copy(),
        users=generated.users.copy(),
        shown_position=generated.shown_position.copy(),
    )
    changed.candidates[cut:] = generated_trace(5, GENERATOR).candidates[: len(generated) - cut]
    changed.users[cut:] = generated.users[cut:][::-1]
    changed.shown_position[cut:] = (generated.shown_position[cut:] + 1) % generated.num_candidates
    other = foresee(changed, start_of(generated), NUM, epochs=2)
    num = cut - foreseen.first
    assert num > 50
    np.testing.assert_array_equal(foreseen.ads[:num], other.ads[:num])
    np.testing.assert_array_equal(foreseen.chances[:num], other.chances[:num])
    assert (foreseen.ads[num:] != other.ads[num:]).any()


def test_what_a_request_shows_is_not_known_when_it_is_ranked(generated: Trace) -> None:
    """The rank of an ad at its own request comes from before it: exchanging it leaves those of its hour's other ads as they were."""
    hour = generated.times_ms // HOUR_MS
    counts = np.bincount(hour - hour[0])
    start = (int(np.flatnonzero(counts > 3)[-1]) + int(hour[0])) * HOUR_MS
    at = np.flatnonzero(generated.times_ms >= start)[0]
    changed = replace(generated, shown_position=generated.shown_position.copy())
    changed.shown_position[at] = (changed.shown_position[at] + 1) % generated.num_candidates
    a, b = (foresee(trace, start, 5, epochs=1) for trace in (generated, changed))
    same_hour = (hour[generated.shown_request[a.shown]] == hour[at]) & (a.shown != at)
    others = same_hour & (generated.users[generated.shown_request[a.shown]] != generated.users[at])
    assert others.any()
    np.testing.assert_array_equal(a.ranks[others], b.ranks[others])


def test_chances_are_chances_and_ranks_beat_chance(generated: Trace, foreseen: Foreseen) -> None:
    assert (np.diff(foreseen.chances, axis=1) <= 0).all()
    assert foreseen.chances.min() >= 0
    assert (foreseen.chances.sum(axis=1) <= 1 + 1e-5).all()
    assert all(len(np.unique(ads)) == NUM for ads in foreseen.ads[:50])
    assert np.array_equal(np.sort(foreseen.shown), np.flatnonzero(generated.shown_request >= foreseen.first))
    # 40 of 200 ads at random would hold a fifth
    assert (foreseen.ranks < NUM).mean() > 0.5


def test_ads_beyond_the_slate_cost_and_may_hit(generated: Trace, foreseen: Foreseen) -> None:
    report = generated.times_ms >= generated.report_ms
    result = simulate(generated, listed(generated, foreseen), setting_of(generated, 0.3))
    spent = np.cumsum(result.computed[report])
    assert (spent <= 0.3 * generated.num_candidates * np.arange(1, report.sum() + 1) + 1e-6).all()
    assert 0 < result.useful < result.rows
    own = np.isin(foreseen.ads[0], generated.candidates[foreseen.first])
    assert own.any()
    assert not own.all()


def test_a_pair_that_nobody_asks_for_is_bought_once_per_ttl() -> None:
    trace = trace_of([0] * 4, [0, 60_000, 120_000, 120_000 + DAY_MS], [[1], [1], [1], [1]])
    ads = np.full((4, 1), 9, dtype=np.int16)
    policy = Listed("l", 0, numbered(trace, 0, ads), np.ones((4, 1), np.float32), np.zeros((4, 2), np.float32), DAY_MS)
    seen: list[list[int]] = []

    class Spy:
        name, priced = "spy", False

        def propose(self, moment: Moment) -> tuple[np.ndarray, np.ndarray]:
            pairs, value = policy.propose(moment)
            seen.append(pairs.tolist())
            return pairs[value > 0], value[value > 0]

    result = simulate(trace, Spy(), setting_of(trace, 1.0))
    assert seen == [[-10]] * 4
    assert result.computed.tolist() == [1, 0, 0, 1]
    assert not result.hits.any()
    assert (result.useful, result.rows) == (0, 2)


def test_a_listed_pair_is_read_like_any_other() -> None:
    trace = trace_of([0, 0, 0], [0, 60_000, 120_000], [[1], [2], [1]])
    ads = np.array([[2], [1], [1]], dtype=np.int16)
    policy = Listed("l", 0, numbered(trace, 0, ads), np.ones((3, 1), np.float32), np.zeros((3, 2), np.float32), DAY_MS)
    assert simulate(trace, policy, setting_of(trace, 1.0)).hits.tolist() == [0, 1, 1]


def test_recall_by_hand() -> None:
    """User 0 is shown ads 1, 2 and 3; after his first request 2 and 9 are foreseen, after his second 1 and 2."""
    minute = 60_000
    trace = trace_of([0, 0, 0], [0, minute, 2 * minute], [[1], [2], [3]])
    foreseen = Foreseen(
        first=0,
        ads=np.array([[2, 9], [1, 2], [4, 5]], dtype=np.int16),
        chances=np.full((3, 2), 0.1, dtype=np.float32),
        shown=np.arange(3),
        ranks=np.array([7, 0, 1]),
    )
    one, two = (shown_against_pairs(trace, foreseen, (k,))[str(k)] for k in (1, 2))
    assert one["at_return"] == pytest.approx(1 / 3)
    assert one["pairs_per_hit"] == 3
    assert two["at_return"] == pytest.approx(2 / 3)
    # ad 2 was there at the second request; 3 never. The second request's 2 still lives and is not computed again
    assert one["speculated"] == two["speculated"] == pytest.approx(1 / 3)
    assert one["speculated_of_returns"] == pytest.approx(1 / 2)
    assert (one["speculated_pairs_per_hit"], two["speculated_pairs_per_hit"]) == (3, 5)
