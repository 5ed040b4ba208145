"""The policies: what each proposes, the price, and models that know only the past."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from solaris.policies import PopularAds, ReactiveFill, Table, TtlRefresh, frequency_values, random_order
from solaris.policy_reuse import reuse_probability
from solaris.policy_value import PairFeatures, ValueModel, tails, true_uses
from solaris.returns import counts_in_hindsight, features, true_returns
from solaris.simulate import Moment, Setting, simulate
from solaris.simulate_generate import Generator, generated_trace
from solaris.simulate_measures import Measures
from solaris.simulate_price import Price
from solaris.trace import DAY_MS, HOUR_MS, Trace
from tests.solaris.test_simulate import setting_of, trace_of

MINUTE = 60_000
GENERATOR = Generator(num_users=150, num_ads=400, num_candidates=12, num_days=10, report_days=3, sessions_per_day=2.0)


@pytest.fixture(scope="module")
def generated() -> Trace:
    return generated_trace(1, GENERATOR)


@pytest.fixture
def six() -> Trace:
    """User 0 asks for ads 1 and 2, then 2 and 3, then 3 and 1; user 1 in between."""
    return trace_of(
        [0, 1, 0, 1, 0, 0],
        [0, MINUTE, 2 * MINUTE, 3 * MINUTE, 40 * MINUTE, 130 * MINUTE],
        [[1, 2], [1, 9], [2, 3], [9, 1], [3, 1], [1, 3]],
    )


def hits(trace: Trace, policy: object, budget: float = 1.0) -> list[float]:
    return simulate(trace, policy, setting_of(trace, budget, HOUR_MS)).hits.tolist()


def test_hand_computed_coverage(six: Trace) -> None:
    assert hits(six, ReactiveFill(six)) == [0, 0, 1, 2, 2, 0]
    # at minute 40 the rows of 3 (minute 2) and 1 (minute 0) are past half their hour and are renewed, but not until minute 130
    assert hits(six, TtlRefresh(six, HOUR_MS)) == [0, 0, 1, 2, 2, 0]
    frequency = frequency_values(six)
    assert hits(six, Table("frequency", frequency, None, HOUR_MS, priced=False)) == [0, 0, 1, 2, 2, 0]


def test_refresh_keeps_rows_that_reactive_lets_die() -> None:
    trace = trace_of([0] * 3, [0, 50 * MINUTE, 100 * MINUTE], [[1]] * 3)
    assert hits(trace, ReactiveFill(trace)) == [0, 1, 0]
    assert hits(trace, TtlRefresh(trace, HOUR_MS)) == [0, 1, 1]


def test_popular_ads_may_never_be_asked_for() -> None:
    trace = trace_of(
        [0, 1, 0, 0], [0, HOUR_MS, HOUR_MS + MINUTE, HOUR_MS + 2 * MINUTE], [[1, 2], [3, 4], [1, 2], [1, 7]]
    )
    result = simulate(trace, PopularAds(trace), setting_of(trace, 1.0, HOUR_MS))
    # nothing is popular before the second hour; then ads 1 and 2 are, also for user 1, who never asks for them
    assert result.computed.tolist() == [0, 2, 2, 0]
    assert result.hits.tolist() == [0, 0, 0, 1]
    assert result.useful == 1


def test_frequency_halves_per_half_life() -> None:
    trace = trace_of([0, 0, 1, 0], [0, DAY_MS, DAY_MS, 3 * DAY_MS], [[1], [1], [1], [1]])
    assert frequency_values(trace).ravel().tolist() == pytest.approx([1, 1.5, 1, 1.375])


def test_labels_count_what_follows_within_the_ttl() -> None:
    trace = trace_of([0, 0, 1, 0], [0, HOUR_MS, HOUR_MS, 2 * HOUR_MS + 1], [[1, 2], [2, 3], [2, 1], [2, 1]])
    assert true_uses(trace, HOUR_MS).tolist() == [[0, 1], [0, 0], [0, 0], [0, 0]]
    assert true_uses(trace, 3 * HOUR_MS).tolist() == [[1, 2], [1, 0], [0, 0], [0, 0]]
    assert true_returns(trace, 4 * HOUR_MS).tolist() == [[1, 1, 2], [0, 1, 1], [0, 0, 0], [0, 0, 0]]


def test_a_renewal_is_worth_what_lies_beyond_the_old_rows_end() -> None:
    tail = np.array([[1.0, 0.25, 0.0]], dtype=np.float32)
    policy = Table("t", np.array([[4.0, 4.0, 4.0, 4.0]], np.float32), tail, 100, caution=2.0)
    _, value = policy.propose(Moment(0, np.arange(4, dtype=np.int32), np.array([-5, 0, 50, 100])))
    assert value.tolist() == [4.0, 2.0, 0.5, 0.0]
    without = Table("t", np.ones((1, 4), np.float32), None, 100)
    assert without.propose(Moment(0, np.arange(4, dtype=np.int32), np.array([-5, 0, 50, 100])))[0].tolist() == [0]


def test_tails_fall_from_one_to_nothing() -> None:
    share = tails(np.array([[1.0, 2.0, 4.0]], dtype=np.float32))[0]
    # a quarter of the returns by a quarter of the TTL, half by half
    assert share[[0, 3, 6, 12]].tolist() == pytest.approx([1, 0.75, 0.5, 0])
    assert (np.diff(share) <= 0).all()


def test_the_price_finds_the_quantile_that_the_budget_buys() -> None:
    rng = np.random.default_rng(0)
    price, bought, ledger = Price(0.1), 0.0, 0.0
    values = rng.lognormal(0, 1, (6_000, 20)).astype(np.float32)
    for i, offered in enumerate(values):
        ledger += 2.0
        price.observe(i * 2 * MINUTE, offered, 20, ledger)
        take = float((offered > price.value).sum())
        take = min(take, ledger)
        ledger -= take
        bought += take * (i >= 3_000)
    assert bought / (3_000 * 20) == pytest.approx(0.1, rel=0.05)
    assert price.value == pytest.approx(np.quantile(values, 0.9), rel=0.1)


def test_models_know_only_the_past(generated: Trace) -> None:
    """What follows the last fit changes no prediction made before it, and what follows a request none of its own."""
    fits = [generated.report_ms - 2 * DAY_MS, generated.report_ms]
    cut = int(np.searchsorted(generated.times_ms, generated.report_ms + DAY_MS))
    whole, part = (_learned(trace, fits) for trace in (generated, generated.until(cut)))
    first = int(np.searchsorted(generated.times_ms, fits[0]))
    for a, b in zip(whole, part, strict=True):
        assert a[first:cut].std() > 0
        np.testing.assert_allclose(a[:cut], b, rtol=1e-6)
        assert not a[:first].any()


def _learned(trace: Trace, fits: list[int]) -> tuple[np.ndarray, np.ndarray]:
    pair_features = PairFeatures(trace, frequency_values(trace))
    uses = true_uses(trace, DAY_MS)
    value, _ = ValueModel(trace, DAY_MS, features(trace), pair_features, uses).predict(fits)
    return value, reuse_probability(trace, DAY_MS, pair_features, uses, fits)


def test_expected_value_beats_reactive_where_reuse_is_known(generated: Trace) -> None:
    fits = [generated.report_ms - 2 * DAY_MS, generated.report_ms]
    value, reuse = _learned(generated, fits)
    report = generated.times_ms >= generated.report_ms
    # the core persists and the rest does not: the model must have found it
    third = generated.num_candidates // 3
    assert value[report, :third].mean() > 1.3 * value[report, third:].mean()
    setting = Setting(0.1, DAY_MS, fits[0])
    measures = Measures(generated)
    mine, logistic, reactive = (
        measures.coverage(simulate(generated, policy, setting))
        for policy in (
            Table("value", value, None, DAY_MS),
            Table("logistic", reuse, None, DAY_MS),
            Table("reactive", random_order(generated), None, DAY_MS, priced=False),
        )
    )
    assert mine > 1.1 * reactive
    assert logistic > reactive


def test_generated_reuse_is_as_stated() -> None:
    generator = replace(GENERATOR, ad_life_ms=1e6 * DAY_MS, num_ads=4_000)
    trace = generated_trace(0, generator)
    before = trace.previous
    pick = np.flatnonzero((before >= 0) & (trace.times_ms - trace.times_ms[before] < MINUTE * 10))
    ranks = np.arange(trace.num_candidates)
    again = np.array([np.isin(trace.candidates[before[r]], trace.candidates[r]) for r in pick])
    gaps = (trace.times_ms[pick] - trace.times_ms[before[pick]]).astype(float)
    stated = np.stack([generator.reuse_probability(ranks, np.full(len(ranks), gap)) for gap in gaps])
    assert again[:, :4].mean() == pytest.approx(stated[:, :4].mean(), abs=0.02)
    assert again[:, 4:].mean() == pytest.approx(stated[:, 4:].mean(), abs=0.03)
    assert len(np.unique(trace.candidates[0])) == trace.num_candidates


def test_the_bound_in_hindsight_learns_from_others_alone(generated: Trace) -> None:
    trace, table = generated, features(generated)
    label = true_returns(trace, DAY_MS)[:, -1]
    start, end = int(trace.times_ms[0]), int(trace.times_ms[-1]) - DAY_MS
    found = counts_in_hindsight(trace, table, label, start, end, cap=60.0, seed=0)
    inside = (trace.times_ms >= start) & (trace.times_ms < end)
    assert found[inside].mean() == pytest.approx(label[inside].mean(), rel=0.2)
    assert np.corrcoef(found[inside], label[inside])[0, 1] > 0.3
    user = int(trace.users[0])
    other = np.where(trace.users == user, 60.0, label).astype(np.float32)
    again = counts_in_hindsight(trace, table, other, start, end, cap=60.0, seed=0)
    mine = trace.users == user
    assert np.array_equal(found[mine], again[mine]), "his own future is not known"
    assert not np.array_equal(found[~mine], again[~mine]), "the others' is"
