"""The simulator: hand-computed replays, edges of lag and TTL, causality, equal compute, bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from solaris.policies import ReactiveFill, Table, frequency_values, random_order
from solaris.policy_value import true_uses
from solaris.simulate import LAG_MS, Moment, Result, Setting, simulate
from solaris.simulate_generate import Generator, generated_trace
from solaris.simulate_measures import Measures, user_embedding_only
from solaris.simulate_oracle import Oracle, triggers
from solaris.trace import DAY_MS, HOUR_MS, Trace

SMALL = Generator(num_users=60, num_ads=300, num_candidates=12, num_days=8, report_days=3, sessions_per_day=2.0)


def trace_of(
    users: list[int], times_ms: list[int], candidates: list[list[int]], shown: list[int] | None = None
) -> Trace:
    """A hand-made trace; measures count from the first request."""
    num = len(users)
    return Trace(
        name="hand",
        users=np.array(users, dtype=np.int32),
        times_ms=np.array(times_ms, dtype=np.int64),
        surfaces=np.zeros(num, dtype=np.int16),
        candidates=np.array(candidates, dtype=np.int16),
        shown_request=np.arange(num, dtype=np.int32),
        shown_position=np.array(shown or [0] * num, dtype=np.int16),
        outcomes=np.zeros(num, dtype=np.float32),
        profiles=np.zeros((max(users) + 1, 0), dtype=np.float32),
        num_ads=100,
        report_ms=times_ms[0],
    )


@pytest.fixture(scope="module")
def generated() -> Trace:
    return generated_trace(3, SMALL)


def setting_of(trace: Trace, budget: float, ttl_ms: int = DAY_MS, **changes: object) -> Setting:
    return replace(Setting(budget, ttl_ms, int(trace.times_ms[0])), **changes)


def policies(trace: Trace) -> list[object]:
    return [
        ReactiveFill(trace),
        Table("random", random_order(trace), None, DAY_MS, priced=False),
        Table("frequency", frequency_values(trace), None, DAY_MS),
        Table(
            "renewing",
            frequency_values(trace),
            np.linspace(1, 0, 13, dtype=np.float32)[None].repeat(len(trace), 0),
            DAY_MS,
        ),
        Table("greedy", true_uses(trace, DAY_MS).astype(np.float32), None, DAY_MS),
    ]


def test_six_requests_by_hand() -> None:
    minute = 60_000
    trace = trace_of(
        [0, 1, 0, 0, 1, 0],
        [0, 1 * minute, 2 * minute, 3 * minute, 4 * minute, 200 * minute],
        [[1, 2], [1, 2], [2, 3], [3, 4], [1, 5], [3, 4]],
        shown=[0, 0, 0, 1, 0, 1],
    )
    result = simulate(trace, ReactiveFill(trace), setting_of(trace, 1.0, HOUR_MS))
    # user 0: 2 is known at the third request, 3 at the fourth; the last comes after the TTL. User 1: only ad 1 comes again.
    assert result.hits.tolist() == [0, 0, 1, 1, 1, 0]
    assert result.shown_hits.tolist() == [0, 0, 1, 0, 1, 0]
    assert result.computed.tolist() == [2, 2, 1, 1, 1, 2]
    # of nine rows, those of (0, 2), (0, 3) and (1, 1) were read
    assert (result.useful, result.rows) == (3, 9)
    measures = Measures(trace)
    assert measures.coverage(result) == pytest.approx(3 / 12)
    assert measures.pair_yield(result) == pytest.approx(3 / 9)
    assert measures.spend(result) == pytest.approx(9 / 12)
    assert 60 * 1_000 <= (result.age_quantile(0.3) or 0) <= 1.1 * 60_000
    assert 3 * minute <= (result.age_quantile(0.95) or 0) <= 3.3 * minute


def test_a_scarce_ledger_buys_the_best_ranked_first() -> None:
    trace = trace_of([0, 0, 0], [0, 60_000, 120_000], [[1, 2], [2, 1], [1, 2]])
    result = simulate(trace, ReactiveFill(trace), setting_of(trace, 0.5))
    # one inference a request: ad 1 first, then what is missing, ad 2
    assert result.computed.tolist() == [1, 1, 0]
    assert result.hits.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("gap_ms", "hit"), [(LAG_MS - 1, 0), (LAG_MS, 1), (HOUR_MS, 1), (HOUR_MS + 1, 0)])
def test_edges_of_lag_and_ttl(gap_ms: int, hit: int) -> None:
    trace = trace_of([0, 0], [0, gap_ms], [[1], [1]])
    assert simulate(trace, ReactiveFill(trace), setting_of(trace, 1.0, HOUR_MS)).hits.tolist() == [0, hit]
    oracle = Oracle(trace, setting_of(trace, 1.0, HOUR_MS)).at(1.0)
    assert oracle.hits.tolist() == [0, hit]


def test_a_renewal_under_way_does_not_hide_the_old_row() -> None:
    trace = trace_of([0, 0, 0], [0, 10_000, 11_000], [[1], [1], [1]])
    renewing = Table("t", np.ones((3, 1), np.float32), np.ones((3, 2), np.float32), HOUR_MS, priced=False)
    result = simulate(trace, renewing, setting_of(trace, 1.0, HOUR_MS))
    assert result.hits.tolist() == [0, 1, 1]
    assert result.computed.tolist() == [1, 1, 1]


def test_finite_capacity_makes_rows_late() -> None:
    trace = trace_of([0, 1, 0, 1], [0, 0, 10_000, 10_000], [[1, 2], [1, 2], [1, 2], [1, 2]])
    # 2 s a pair: user 0's rows come at 4 + 5 s, user 1's at 8 + 5 s: computed, and misses
    result = simulate(trace, ReactiveFill(trace), setting_of(trace, 1.0, pairs_per_s=0.5))
    assert result.hits.tolist() == [0, 0, 2, 0]
    assert result.computed[:2].tolist() == [2, 2]


def test_the_store_keeps_the_rows_used_last() -> None:
    trace = trace_of([0, 0, 0], [0, 60_000, 120_000], [[1], [2], [1]])
    hits = [simulate(trace, ReactiveFill(trace), setting_of(trace, 1.0, max_rows=n)).hits.sum() for n in (1, 2)]
    assert hits == [0, 1]


def test_nothing_after_a_moment_changes_a_decision_before_it(generated: Trace) -> None:
    half = len(generated) // 2
    other = generated_trace(4, SMALL)
    changed = replace(generated, candidates=generated.candidates.copy(), users=generated.users.copy())
    changed.candidates[half:] = other.candidates[: len(generated) - half][: len(changed.candidates[half:])]
    changed.users[half:] = generated.users[half:][::-1]
    cut = generated.until(half)
    for index in range(4):
        a, b, c = (simulate(t, policies(t)[index], setting_of(t, 0.2)) for t in (generated, changed, cut))
        assert a.computed[:half].any()
        np.testing.assert_array_equal(a.computed[:half], b.computed[:half])
        np.testing.assert_array_equal(a.hits[:half], b.hits[:half])
        np.testing.assert_array_equal(a.computed[:half], c.computed)
    # the test sees a policy that does peek
    peeking = [simulate(t, policies(t)[4], setting_of(t, 0.2)).computed[:half] for t in (generated, cut)]
    assert (peeking[0] != peeking[1]).any()


@pytest.mark.parametrize("budget", [0.05, 0.15])
def test_equal_compute(generated: Trace, budget: float) -> None:
    report = generated.times_ms >= generated.report_ms
    for policy in policies(generated):
        result = simulate(generated, policy, setting_of(generated, budget))
        spent = np.cumsum(result.computed[report])
        allowed = np.cumsum(np.full(report.sum(), budget * generated.num_candidates))
        assert (spent <= allowed + 1e-6).all(), policy.name
        assert spent[-1] > 0.85 * allowed[-1], policy.name
        assert result.rows == spent[-1]
        assert 0 < result.useful <= result.rows


def test_a_run_costs_its_request_side_too(generated: Trace) -> None:
    report = generated.times_ms >= generated.report_ms
    result = simulate(generated, ReactiveFill(generated), setting_of(generated, 0.2, request_pairs=3.0))
    assert (
        result.computed[report].sum() + 3 * result.runs[report].sum() <= 0.2 * report.sum() * generated.num_candidates
    )


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.3])
def test_no_policy_beats_the_oracle_and_the_oracle_not_the_clairvoyant(generated: Trace, budget: float) -> None:
    whole = replace(generated, report_ms=int(generated.times_ms[0]))
    setting = setting_of(whole, budget)
    measures = Measures(whole)
    oracle, clairvoyant = (Oracle(whole, setting, any_moment=m).at(budget) for m in (False, True))
    for policy in policies(whole):
        assert measures.coverage(simulate(whole, policy, setting)) <= measures.coverage(oracle) + 1e-9, policy.name
    assert measures.coverage(oracle) <= measures.coverage(clairvoyant)
    assert measures.spend(oracle) <= budget + 1e-9


def test_the_oracle_is_exact() -> None:
    """Against all choices of rows, on requests of one user."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        times = np.sort(rng.choice(100, 7, replace=False)) * HOUR_MS // 4
        asked = rng.integers(0, 2, 7)
        # ad 1 is asked for at some requests, ad 2 at the others
        trace = trace_of([0] * 7, times.tolist(), [[1 + a] for a in asked.tolist()])
        setting = setting_of(trace, 1.0, 6 * HOUR_MS)
        for rows in (1, 2, 3):
            best = max(_covered(times, asked, chosen) for chosen in _choices(14, rows))
            assert Oracle(trace, setting).at(rows / 7).hits.sum() == pytest.approx(best)


def _choices(num: int, rows: int) -> list[tuple[int, ...]]:
    import itertools

    return list(itertools.combinations(range(num), rows))


def _covered(times: np.ndarray, asked: np.ndarray, chosen: tuple[int, ...]) -> int:
    """Asks covered by rows (request, ad) numbered request * 2 + ad."""
    hit = set()
    for row in chosen:
        start, ad = times[row // 2], row % 2
        hit |= {i for i, t in enumerate(times) if asked[i] == ad and start + LAG_MS <= t <= start + 6 * HOUR_MS}
    return len(hit)


def test_triggers_skip_requests_within_the_lag() -> None:
    trace = trace_of([0, 0, 0, 1], [0, 60_000, 60_000 + LAG_MS - 1, 70_000], [[1]] * 4)
    assert triggers(trace, LAG_MS).tolist() == [-1, 0, 0, -1]


def test_user_embedding_covers_the_user_level_only() -> None:
    trace = trace_of([0, 0, 0, 1], [0, 60_000, 60_000 + 2 * HOUR_MS, 60_000 + 2 * HOUR_MS], [[1]] * 4)
    result = user_embedding_only(trace, setting_of(trace, 1.0, HOUR_MS))
    assert result.user_rows.tolist() == [0, 1, 0, 0]
    assert not result.hits.any()


def test_the_interval_over_users_covers() -> None:
    """Over repeated samples of users with a known mean, the 95 % interval holds it about 95 times in 100, and it is not trivial."""
    inside, widths = 0, []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num = 150
        trace = trace_of(list(range(num)), list(range(num)), [[1, 2]] * num)
        result = Result.empty("r", trace)
        result.hits = rng.binomial(2, 0.3, num).astype(float)
        interval = Measures(trace, seed=seed).coverage_interval(result)
        inside += interval.low <= 0.3 <= interval.high
        widths.append(interval.high - interval.low)
    assert 51 <= inside <= 60
    # +- 1.96 sd of a mean of 300 coins
    assert np.mean(widths) == pytest.approx(2 * 1.96 * np.sqrt(0.3 * 0.7 / 300), rel=0.15)


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        trace_of([0, 0], [1, 0], [[1], [1]])


def test_a_moment_shows_what_is_under_way(generated: Trace) -> None:
    seen: list[Moment] = []

    class Spy:
        name, priced = "spy", False

        def propose(self, moment: Moment) -> tuple[np.ndarray, np.ndarray]:
            seen.append(moment)
            return moment.pairs, np.ones(len(moment.pairs), np.float32)

    trace = trace_of([0, 0], [0, LAG_MS - 1], [[1], [1]])
    simulate(trace, Spy(), setting_of(trace, 1.0, HOUR_MS))
    assert [m.left_ms[0] > 0 for m in seen] == [False, True]
